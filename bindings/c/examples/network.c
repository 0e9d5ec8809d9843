/* Trains a network of two layers to tell points inside a ring from those outside, with its parameters,
 * gradients and optimizer state on disk; saves it, loads it into another engine, and compares.
 *
 *   cc -std=c11 network.c $(pkg-config --cflags --libs sluice) -lm && ./a.out FOLDER
 * or cmake -B build . && cmake --build build && build/network FOLDER, with the CMakeLists.txt beside this
 * file. FOLDER: on a disk, for swap and the checkpoint.
 */
#include <math.h>
#include <sluice.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 2, HIDDEN = 65536, BATCH = 16, STEPS = 40 };

/* Every call of Sluice's can fail, and says why. */
static void check(sluice_status status) {
  if (status == SLUICE_OK) return;
  fprintf(stderr, "network: %s\n", sluice_last_error());
  exit(1);
}

/* The same numbers on every machine, between -1 and 1. */
static float noise(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

/* ---- the model: two units, which are never needed together ---- */

enum { HIDDEN_WEIGHT, HIDDEN_BIAS, OUTPUT_WEIGHT, OUTPUT_BIAS };
enum { HIDDEN_LAYER, OUTPUT_LAYER };

static void add_parameter(sluice_model* model, const char* name, uint64_t rows, uint64_t columns) {
  const uint64_t shape[] = {rows, columns};
  sluice_parameter parameter = SLUICE_INIT(sluice_parameter);
  parameter.name = name;
  parameter.shape = columns == 0 ? &rows : shape;
  parameter.dimensions = columns == 0 ? 1 : 2;
  parameter.group = columns == 0 ? 1 : 0; /* weights decay, biases do not */
  check(sluice_model_add_parameter(model, &parameter, NULL));
}

static sluice_engine* make_engine(const char* folder) {
  sluice_model* model;
  check(sluice_model_create(&model));
  check(sluice_model_add_unit(model, "hidden", NULL));
  add_parameter(model, "hidden.weight", HIDDEN, INPUTS);
  add_parameter(model, "hidden.bias", HIDDEN, 0);
  check(sluice_model_add_unit(model, "output", NULL));
  add_parameter(model, "output.weight", HIDDEN, 0);
  add_parameter(model, "output.bias", 1, 0);

  sluice_folder disk = {folder, 1u << 30};
  sluice_engine_options options = SLUICE_INIT(sluice_engine_options);
  options.memory = 512u << 20;
  options.reserved = 16u << 20; /* this program's own arrays */
  options.disk = &disk;
  options.disk_folders = 1;
  options.groups = 2;
  /* So small a network would stay in memory; here all of it shall come from disk. */
  options.place_parameters = options.place_gradients = options.place_state = "disk";
  sluice_engine* engine;
  check(sluice_engine_create(model, &options, &engine));
  sluice_model_destroy(model);
  return engine;
}

static int first_values(void* context, uint32_t parameter, uint64_t first, float* values, uint64_t elements) {
  (void)context;
  const float scale = parameter == HIDDEN_WEIGHT ? 2.0f : parameter == OUTPUT_WEIGHT ? 1e-4f : 0.0f;
  for (uint64_t i = 0; i < elements; ++i) {
    uint32_t state = (uint32_t)(first + i) * 2654435761u + parameter;
    values[i] = scale * noise(&state);
  }
  return 0;
}

/* ---- a step ---- */

typedef struct {
  float x[BATCH][INPUTS], wanted[BATCH];      /* the points, and 1 inside the ring, 0 outside */
  float hidden[BATCH][HIDDEN], output[BATCH]; /* activations */
  float gradient[HIDDEN * INPUTS], bias_gradient[HIDDEN];
  float to_hidden[BATCH][HIDDEN];
} workspace;

static const float* values_of(sluice_engine* engine, uint32_t parameter) {
  const void* data;
  check(sluice_engine_parameter(engine, parameter, &data));
  return data;
}

static void draw_points(workspace* w, uint32_t* state) {
  for (int b = 0; b < BATCH; ++b) {
    w->x[b][0] = noise(state);
    w->x[b][1] = noise(state);
    const float radius = sqrtf(w->x[b][0] * w->x[b][0] + w->x[b][1] * w->x[b][1]);
    w->wanted[b] = radius > 0.4f && radius < 0.9f ? 1.0f : 0.0f;
  }
}

static float forward(sluice_engine* engine, workspace* w) {
  check(sluice_engine_acquire(engine, HIDDEN_LAYER, SLUICE_READ));
  const float *weight = values_of(engine, HIDDEN_WEIGHT), *bias = values_of(engine, HIDDEN_BIAS);
  for (int b = 0; b < BATCH; ++b)
    for (int h = 0; h < HIDDEN; ++h) {
      const float sum = weight[2 * h] * w->x[b][0] + weight[2 * h + 1] * w->x[b][1] + bias[h];
      w->hidden[b][h] = sum > 0 ? sum : 0;
    }
  check(sluice_engine_release(engine, HIDDEN_LAYER));

  float loss = 0;
  check(sluice_engine_acquire(engine, OUTPUT_LAYER, SLUICE_READ));
  const float *output = values_of(engine, OUTPUT_WEIGHT), *output_bias = values_of(engine, OUTPUT_BIAS);
  for (int b = 0; b < BATCH; ++b) {
    float sum = output_bias[0];
    for (int h = 0; h < HIDDEN; ++h) sum += output[h] * w->hidden[b][h];
    w->output[b] = sum;
    loss += (sum - w->wanted[b]) * (sum - w->wanted[b]) / BATCH;
  }
  check(sluice_engine_release(engine, OUTPUT_LAYER));
  return loss;
}

static void backward(sluice_engine* engine, workspace* w) {
  float to_output[BATCH], bias_gradient = 0;
  check(sluice_engine_acquire(engine, OUTPUT_LAYER, SLUICE_GRADIENT));
  const float* output = values_of(engine, OUTPUT_WEIGHT);
  memset(w->gradient, 0, sizeof(w->gradient));
  for (int b = 0; b < BATCH; ++b) {
    to_output[b] = 2 * (w->output[b] - w->wanted[b]) / BATCH;
    bias_gradient += to_output[b];
    for (int h = 0; h < HIDDEN; ++h) {
      w->gradient[h] += to_output[b] * w->hidden[b][h];
      w->to_hidden[b][h] = w->hidden[b][h] > 0 ? to_output[b] * output[h] : 0;
    }
  }
  check(sluice_engine_add_gradient(engine, OUTPUT_WEIGHT, w->gradient, SLUICE_F32));
  check(sluice_engine_add_gradient(engine, OUTPUT_BIAS, &bias_gradient, SLUICE_F32));
  check(sluice_engine_release(engine, OUTPUT_LAYER));

  check(sluice_engine_acquire(engine, HIDDEN_LAYER, SLUICE_GRADIENT));
  memset(w->gradient, 0, sizeof(w->gradient));
  memset(w->bias_gradient, 0, sizeof(w->bias_gradient));
  for (int b = 0; b < BATCH; ++b)
    for (int h = 0; h < HIDDEN; ++h) {
      w->gradient[2 * h] += w->to_hidden[b][h] * w->x[b][0];
      w->gradient[2 * h + 1] += w->to_hidden[b][h] * w->x[b][1];
      w->bias_gradient[h] += w->to_hidden[b][h];
    }
  check(sluice_engine_add_gradient(engine, HIDDEN_WEIGHT, w->gradient, SLUICE_F32));
  check(sluice_engine_add_gradient(engine, HIDDEN_BIAS, w->bias_gradient, SLUICE_F32));
  check(sluice_engine_release(engine, HIDDEN_LAYER));
}

static float train_step(sluice_engine* engine, workspace* w, uint32_t* state) {
  check(sluice_engine_begin_step(engine, NULL));
  draw_points(w, state);
  const float loss = forward(engine, w);
  backward(engine, w);
  const sluice_group_settings weights = {sizeof weights, 1e-5, 0.01, NULL, 0},
                              biases = {sizeof biases, 1e-5, 0, NULL, 0};
  const sluice_group_settings groups[] = {weights, biases};
  sluice_step_settings settings = SLUICE_INIT(sluice_step_settings);
  settings.groups = groups;
  settings.group_count = 2;
  settings.clip = 1.0;
  check(sluice_engine_step(engine, &settings, NULL));
  return loss;
}

/* ---- the run ---- */

static void print_ledger(sluice_engine* engine) {
  sluice_ledger_line lines[32];
  size_t count;
  check(sluice_engine_ledger(engine, lines, 32, &count));
  for (size_t i = 0; i < count && i < 32; ++i)
    if (lines[i].peak > 0)
      printf("%-6s %-16s %8.1f MiB at most\n", lines[i].tier, lines[i].purpose,
             (double)lines[i].peak / (1 << 20));
}

int main(int count, char** arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: network FOLDER\n");
    return 2;
  }
  char out[4096];
  if (snprintf(out, sizeof(out), "%s/network-checkpoints", arguments[1]) >= (int)sizeof(out)) return 2;
  workspace* w = malloc(sizeof(workspace));
  if (w == NULL) return 1;
  uint32_t state = 1;

  sluice_engine* engine = make_engine(arguments[1]);
  check(sluice_engine_set_values(engine, HIDDEN_LAYER, first_values, NULL));
  check(sluice_engine_set_values(engine, OUTPUT_LAYER, first_values, NULL));
  for (int step = 1; step <= STEPS; ++step) {
    const float loss = train_step(engine, w, &state);
    if (step == 1 || step % 10 == 0) printf("step %d: loss %.4f\n", step, loss);
  }
  print_ledger(engine);
  char* checkpoint;
  check(sluice_engine_save(engine, out, 1, &checkpoint));
  printf("saved %s\n", checkpoint);

  sluice_engine* other = make_engine(arguments[1]);
  check(sluice_engine_load(other, checkpoint));
  sluice_text_destroy(checkpoint);
  uint32_t other_state = state;
  const float expected = train_step(engine, w, &state), found = train_step(other, w, &other_state);
  printf("the next loss is %.9g, and %.9g after loading: %s\n", expected, found,
         expected == found ? "the same after loading" : "NOT the same");
  sluice_engine_destroy(other);
  sluice_engine_destroy(engine);
  free(w);
  return expected == found ? 0 : 1;
}
