/* Trains one model with two ranks, which are processes that share memory, or with those that mpirun or srun
 * has started, on any machines. Each of them sees what is to be learned through noise of its own; what they
 * learn together has less of it. The optimizer's state is partitioned.
 *
 *   cc -std=c11 ranks.c $(pkg-config --cflags --libs sluice) -lm && ./a.out
 *   mpirun -n 4 --host first:2,second:2 --bind-to none ./a.out mpi
 * or by the CMakeLists.txt beside this file.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <sluice.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 2, MOST_RANKS = 64, ELEMENTS = 1 << 20, STEPS = 100 };

/* Every call of Sluice's can fail, and says why. An error of one rank ends the others, too. */
static void check(sluice_status status) {
  if (status == SLUICE_OK) return;
  fprintf(stderr, "ranks: %s\n", sluice_last_error());
  exit(1);
}

/* The same numbers on every machine, between -1 and 1. */
static float noise(uint32_t number) {
  number = (number ^ 61u ^ (number >> 16)) * 9u;
  number = (number ^ (number >> 4)) * 0x27d4eb2du;
  return (float)((number ^ (number >> 15)) >> 8) / 8388608.0f - 1.0f;
}
static float wanted(uint32_t i) { return noise(i) > 0 ? 0.5f : -0.5f; }

static sluice_engine* make_engine(sluice_ranks* ranks) {
  sluice_model* model;
  check(sluice_model_create(&model));
  check(sluice_model_add_unit(model, "layer", NULL));
  const uint64_t shape[] = {ELEMENTS};
  sluice_parameter parameter = SLUICE_INIT(sluice_parameter);
  parameter.name = "weight";
  parameter.shape = shape;
  parameter.dimensions = 1;
  check(sluice_model_add_parameter(model, &parameter, NULL));
  sluice_engine_options options = SLUICE_INIT(sluice_engine_options);
  options.memory = 256u << 20; /* of each rank */
  options.reserved = 16u << 20;
  options.threads = 1;
  options.ranks = ranks;
  options.stage = SLUICE_STAGE(1);
  sluice_engine* engine;
  check(sluice_engine_create(model, &options, &engine));
  sluice_model_destroy(model);
  return engine;
}

/* Only rank 0 knows the first values; the others get them from it. */
static void set_first_values(sluice_engine* engine, sluice_ranks* ranks, uint32_t rank, float* values) {
  for (uint32_t i = 0; rank == 0 && i < ELEMENTS; ++i) values[i] = 0.1f * noise(i + 12345u);
  check(sluice_ranks_broadcast(ranks, "the first values", values, ELEMENTS * sizeof(float)));
  const sluice_array array = {values, SLUICE_F32};
  sluice_arrays arrays = SLUICE_INIT(sluice_arrays);
  arrays.parameters = arrays.arrays = 1;
  arrays.data = &array;
  check(sluice_engine_set_values(engine, 0, sluice_read_values_from_arrays, &arrays));
}

/* `number` is another one for each step and rank. */
static void train_step(sluice_engine* engine, uint32_t number, float* gradient) {
  check(sluice_engine_begin_step(engine, NULL));
  check(sluice_engine_acquire(engine, 0, SLUICE_GRADIENT));
  const void* data;
  check(sluice_engine_parameter(engine, 0, &data));
  const float* values = data;
  for (uint32_t i = 0; i < ELEMENTS; ++i)
    gradient[i] = values[i] - (wanted(i) + noise((number + 1) * 7919u + i));
  check(sluice_engine_add_gradient(engine, 0, gradient, SLUICE_F32));
  check(sluice_engine_release(engine, 0));
  const sluice_group_settings group = {sizeof group, 0.01, 0, NULL, 0};
  sluice_step_settings settings = SLUICE_INIT(sluice_step_settings);
  settings.groups = &group;
  settings.group_count = 1;
  check(sluice_engine_step(engine, &settings, NULL)); /* waits for the other ranks */
}

/* Any rank may read values alone. */
static double distance(sluice_engine* engine, uint64_t* sum) {
  check(sluice_engine_acquire(engine, 0, SLUICE_READ));
  const void* data;
  check(sluice_engine_parameter(engine, 0, &data));
  const float* values = data;
  double squares = 0;
  *sum = 0;
  for (uint32_t i = 0; i < ELEMENTS; ++i) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof(bits));
    *sum = *sum * 31 + bits;
    squares += (values[i] - wanted(i)) * (values[i] - wanted(i));
  }
  check(sluice_engine_release(engine, 0));
  return sqrt(squares / ELEMENTS);
}

static int same_on_all(sluice_ranks* ranks, uint32_t size, uint64_t sum) {
  char* all;
  size_t sizes[MOST_RANKS];
  int same = 1;
  check(sluice_ranks_exchange(ranks, "the sums of the values", &sum, sizeof(sum), &all, sizes));
  for (uint32_t rank = 1; rank < size; ++rank)
    same &= memcmp(all, all + rank * sizeof(sum), sizeof(sum)) == 0;
  sluice_text_destroy(all);
  return same;
}

static int run(sluice_ranks* ranks) {
  uint32_t rank, size;
  check(sluice_ranks_rank(ranks, &rank));
  check(sluice_ranks_size(ranks, &size));
  float* array = malloc(ELEMENTS * sizeof(float));
  if (array == NULL || size > MOST_RANKS) return 1;
  sluice_engine* engine = make_engine(ranks);
  set_first_values(engine, ranks, rank, array);
  uint64_t sum;
  const double before = distance(engine, &sum);
  for (uint32_t step = 0; step < STEPS; ++step) train_step(engine, step * size + rank, array);
  const double after = distance(engine, &sum);
  const int same = same_on_all(ranks, size, sum);
  if (rank == 0) printf("the distance was %.3f and is %.3f\n", before, after);
  if (rank == 0 && same) printf("all %u ranks have the same values\n", size);
  sluice_engine_destroy(engine);
  sluice_ranks_destroy(ranks);
  free(array);
  return same && after < before / 2 ? 0 : 1;
}

static int run_in_memory(int memory, uint32_t rank) {
  sluice_ranks* ranks;
  check(sluice_ranks_create_local(memory, rank, NULL, &ranks));
  return run(ranks);
}

static int run_as_launched(void) {
  sluice_ranks* ranks;
  check(sluice_ranks_create_mpi(NULL, &ranks));
  return run(ranks);
}

int main(int count, char** words) {
  if (count > 1 && strcmp(words[1], "mpi") == 0) return run_as_launched();
  int memory, failed = 0;
  check(sluice_ranks_memory(RANKS, &memory));
  pid_t children[RANKS];
  for (uint32_t rank = 0; rank < RANKS; ++rank) { /* before any sluice_ranks, which has threads */
    children[rank] = fork();
    if (children[rank] == 0) exit(run_in_memory(memory, rank));
    if (children[rank] < 0) return 1;
  }
  close(memory);
  for (uint32_t rank = 0; rank < RANKS; ++rank) {
    int status;
    failed |= waitpid(children[rank], &status, 0) < 0 || status != 0;
  }
  return failed;
}
