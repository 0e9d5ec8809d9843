/* Sluice's C ABI: a model's parameters, gradients and optimizer state in stated memory and on disk.
 *
 * A caller describes its model as units (parameters that are needed together) and asks for an engine within a
 * budget. Then, in each step: acquire a unit, compute with its parameters where they lie, hand in gradients,
 * release it; at last sluice_engine_step() updates. What does not fit in memory comes from disk and goes back
 * there. See docs/architecture.md for the words, and examples/network.c for a whole program.
 *
 * Building: cc program.c $(pkg-config --cflags --libs sluice), or in CMake find_package(sluice REQUIRED) and
 * target_link_libraries(program PRIVATE sluice::sluice). pkg-config looks below PKG_CONFIG_PATH, CMake below
 * CMAKE_PREFIX_PATH, and the loader below LD_LIBRARY_PATH or a program's own run path, where Sluice is
 * installed in a folder that the system does not know.
 *
 * Results: every function that can fail returns a status. Where it is not SLUICE_OK, sluice_last_error()
 * says, for the calling thread, what was asked, what was found and what to do; outputs are then untouched.
 *
 * Threads: every function may be called from any thread. Calls on one engine take turns.
 * sluice_engine_acquire() may wait for the disk, and nothing else of that engine goes on meanwhile.
 *
 * Questions take a const sluice_engine: they change nothing, and are answered by one that has failed, too.
 * What is held, whether there is a step, which gradients there are: callers ask, and need not count along.
 *
 * Ownership: what a _create function gives belongs to the caller, who gives it back with the _destroy
 * function of the same name. Pointers handed in are read during the call only, unless said otherwise.
 *
 * Versions: a struct's first member is its size as the caller was compiled with it (SLUICE_INIT sets it);
 * members that a later version adds have the default that zero means. sluice_abi_version() changes where old
 * callers would break.
 *
 * Strings are UTF-8. Sizes are in bytes unless they say elements.
 */
#ifndef SLUICE_H
#define SLUICE_H
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "Sluice needs Linux"
#endif
#define SLUICE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define SLUICE_ABI_VERSION 1u

/* A struct of Sluice's, zeroed but for its size: sluice_engine_options options =
 * SLUICE_INIT(sluice_engine_options); */
#ifdef __cplusplus
#define SLUICE_INIT(type)      \
  ([] {                        \
    type value = {};           \
    value.size = sizeof(type); \
    return value;              \
  }())
#else
#define SLUICE_INIT(type) \
  { .size = sizeof(type) }
#endif

typedef enum sluice_status {
  SLUICE_OK = 0,
  SLUICE_INVALID_ARGUMENT = 1, /* what was asked for is not valid; nothing was changed */
  SLUICE_NOT_FOUND = 2,        /* a named file or tensor does not exist */
  SLUICE_BUDGET = 3,           /* it does not fit in the memory or the disk space that was stated */
  SLUICE_IO = 4,               /* the system refused or failed an operation */
  SLUICE_CORRUPT = 5,    /* bytes that were read are not what was written, or not of the expected format */
  SLUICE_NOT_FINITE = 6, /* a gradient is infinite or not a number; no parameter was changed */
  SLUICE_STATE = 7,      /* a call that is not allowed now, or an engine that has failed */
  SLUICE_INTERNAL = 8,   /* a defect in Sluice */
  SLUICE_CALLBACK = 9    /* a function of the caller's returned something other than 0 */
} sluice_status;

typedef enum sluice_dtype { SLUICE_F32 = 0, SLUICE_BF16 = 1, SLUICE_F16 = 2 } sluice_dtype;

/* Of the optimizer's state; docs/optimizers.md says what each is. */
typedef enum sluice_state_type {
  SLUICE_STATE_F32 = 0,
  SLUICE_STATE_BF16 = 1,
  SLUICE_STATE_8BIT = 2 /* codes, with an f32 scale for each 256 */
} sluice_state_type;

/* The text of the calling thread's last failure; "" where there was none. Valid until its next failure. */
SLUICE_API const char* sluice_last_error(void);
SLUICE_API uint32_t sluice_abi_version(void);
SLUICE_API const char* sluice_version(void); /* "0.1.0" */
/* For text that a function below gives to the caller. NULL is allowed. */
SLUICE_API void sluice_text_destroy(char* text);

/* ---- the model: units and parameters ---- */

typedef struct sluice_model sluice_model;

typedef struct sluice_parameter {
  size_t size;
  const char* name;      /* its logical name, as a checkpoint holds it; unique in the model */
  const uint64_t* shape; /* dimensions[...]; none of them 0 */
  size_t dimensions;     /* 0: one element */
  uint32_t group;  /* whose settings an update applies to it: an index into sluice_step_settings.groups */
  uint32_t frozen; /* not 0: it is never updated; all parameters of a unit are frozen, or none is */
  /* A large parameter may span several units: each has, as its only parameter, the span that follows the one
   * of the unit before, with the same name and shape, and a number of its own, which other functions mean by
   * it; elements of a span count from its first. All spans but the last have a multiple of SLUICE_SPAN_GRAIN
   * elements, and their memory follows one another, so that the whole is one array. Adafactor, and muon where
   * it is not by elements, update all spans together: in a step each of them has a gradient, or none has
   * (SLUICE_STATE otherwise, from sluice_engine_step()). span_elements 0: the unit has the whole. */
  uint64_t span_first, span_elements;
  sluice_dtype dtype; /* one in all of a unit; of what is narrower than f32 the optimizer keeps an f32 master
                         (see no_master) */
  uint32_t by_elements; /* not 0: an optimizer of matrices (muon) leaves it to AdamW; best for embeddings and
                           heads */
} sluice_parameter;
#define SLUICE_SPAN_GRAIN 1048576u

SLUICE_API sluice_status sluice_model_create(sluice_model** model);
/* An engine that was made of the model keeps its own copy. NULL is allowed. */
SLUICE_API void sluice_model_destroy(sluice_model* model);
/* Units are numbered from 0 in the order in which they are added: best that of a forward pass. */
SLUICE_API sluice_status sluice_model_add_unit(sluice_model* model, const char* name, uint32_t* unit);
/* To the unit that was added last. Parameters are numbered from 0 over all units. */
SLUICE_API sluice_status sluice_model_add_parameter(sluice_model* model, const sluice_parameter* parameter,
                                                    uint32_t* id);

/* ---- the plan ---- */

/* sgemm of a BLAS with 32-bit integers (sgemm_): columns are contiguous, and every argument is an address. */
typedef void (*sluice_sgemm)(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                             const int* k, const float* alpha, const float* a, const int* lda, const float* b,
                             const int* ldb, const float* beta, float* c, const int* ldc);

/* Calls work(data) on up to `threads` threads at once, its caller's one of them, and returns when all have
 * ended; flags: 0. libgomp's GOMP_parallel() is one. */
typedef void (*sluice_team)(void (*work)(void* data), void* data, unsigned threads, unsigned flags);

typedef struct sluice_folder {
  const char* path;
  uint64_t limit; /* how much of it may be taken; 0: what is free, less a twentieth */
} sluice_folder;

/* A setting of an optimizer, by its key: {"beta1", 0.9, NULL}. docs/optimizers.md has those of each, and
 * sluice_optimizer_settings() gives them. What is not given is as the optimizer has it. A key that it does
 * not have, one that is given twice and a value out of its range are SLUICE_INVALID_ARGUMENT, with what is
 * allowed.
 */
typedef struct sluice_setting {
  const char* name;
  double number;    /* of a switch 0 or 1 */
  const char* text; /* of a choice; else NULL */
} sluice_setting;

/* What may be set of which optimizer, as a JSON object that is given to the caller: for each optimizer a list
 * of its settings with name, type, range, default, whether it may come with a step, help and source. */
SLUICE_API sluice_status sluice_optimizer_settings(char** json);
/* Whether an engine would take these settings[setting_count]. */
SLUICE_API sluice_status sluice_optimizer_check(const char* optimizer, const sluice_setting* settings,
                                                size_t setting_count);

typedef struct sluice_engine_options {
  size_t size;
  uint64_t memory;   /* for the whole process, what the caller itself needs (`reserved`) included */
  uint64_t reserved; /* what the caller will take beyond what the process holds now: activations, workspace,
                        gradients */
  const sluice_folder*
      disk; /* folders[disk_folders] for what does not fit in memory; striped where there are several */
  size_t disk_folders;
  uint32_t threads;             /* of updates; 0: the cores that this process may use */
  uint32_t held_units;          /* the most units that are held at once; 0: 1 */
  uint32_t groups;              /* parameter groups; 0: 1 */
  uint64_t trace_events;        /* the latest that are kept for sluice_engine_save_trace(); 0: none */
  uint32_t prefetch;            /* accesses fetched ahead; 0: planned */
  const char* place_parameters; /* "memory", "disk"; NULL: planned. For tests and measurements */
  const char* place_gradients;
  const char* place_state;
  uint64_t given_back;    /* what the process holds now and gives back until the last unit has its values */
  uint32_t serve_touches; /* not 0: what is read while its unit is not held is brought in; see SLUICE_READ */
  /* "adamw", "adam", "lion", "sgd", "adafactor", "muon"; NULL: "adamw". See docs/optimizers.md */
  const char* optimizer;
  const sluice_setting* settings; /* settings[setting_count] of the optimizer */
  size_t setting_count;
  sluice_state_type state; /* of the optimizer's arrays */
  uint32_t no_master; /* not 0, of SLUICE_BF16 parameters: no masters; updates are rounded stochastically */
  uint64_t seed;      /* of that rounding */
  /* not 0: a unit is updated as soon as it is released with gradients, which are never stored. Each parameter
   * gets its gradient once in a step, and sluice_engine_begin_step() takes the settings; no clipping by norm,
   * no kept gradients. */
  uint32_t update_in_backward;
  /* What multiplies matrices, for muon: a BLAS of the caller's, which takes what memory it needs from
   * `reserved`, and is called one call at a time by the threads that call the engine. NULL: the matrix
   * library beside this one, which is then loaded: SLUICE_NOT_FOUND where it cannot be. */
  sluice_sgemm sgemm;
  /* What the engine's loops run on, from every thread that calls it: for a caller whose own loops run on this
   * team, and whose threads wait spinning, as those of OpenMP do. NULL: threads of the engine's own. */
  sluice_team team;
} sluice_engine_options;

/* Where every byte would live, without taking any: a JSON object, given to the caller, as `sluice plan
 * --json` prints. SLUICE_BUDGET where it does not fit: which budget is short, by how much, and what would
 * fit. */
SLUICE_API sluice_status sluice_plan(const sluice_model* model, const sluice_engine_options* options,
                                     char** json);

/* ---- the engine ---- */

typedef struct sluice_engine sluice_engine;

/* Takes all memory and disk space of the plan. Parameters have no values yet. */
SLUICE_API sluice_status sluice_engine_create(const sluice_model* model, const sluice_engine_options* options,
                                              sluice_engine** engine);
/* Waits for what is under way. Addresses of parameters are no longer valid. NULL is allowed. */
SLUICE_API void sluice_engine_destroy(sluice_engine* engine);
/* A unit's addresses, when its engine is gone. */
typedef struct sluice_home sluice_home;
/* For a caller that refers to parameters' addresses beyond the engine's end: homes[units] are the caller's,
 * and each keeps its unit's addresses until it is destroyed. With `with_values` pending updates are applied,
 * and the values stay where they are, in their type, as ordinary memory that may be written; the engine's
 * memory is given back for it on the way. Without, a touch of them ends the process with a message that names
 * the unit; an engine that has failed can so be left, too. Gradients and the optimizer's state are dropped.
 * Afterwards sluice_engine_destroy() alone may be called. With `with_values`, and with nothing changed:
 * SLUICE_BUDGET: it needs more than the budget or the system has, with `besides` bytes that the caller takes
 * meanwhile; SLUICE_STATE: a unit is held, or has no values. SLUICE_STATE also where they have left already.
 * Any other failure: homes are given, and those of units that had
 * not left by then have no values. homes NULL: only finds out whether it would fit. */
SLUICE_API sluice_status sluice_engine_leave(sluice_engine* engine, uint32_t with_values, uint64_t besides,
                                             sluice_home** homes);
/* From any thread, once. NULL is allowed. */
SLUICE_API void sluice_home_destroy(sluice_home* home);
/* Another plan, for when the caller will take `reserved` (as options.reserved counts it, from what the
 * process held when the engine was made): what has another place by it is moved, values and addresses stay,
 * and the memory that was stated is kept meanwhile. Between steps, with every unit given values. With nothing
 * changed: SLUICE_BUDGET where no plan fits, or the disk has no room for what would leave memory;
 * SLUICE_STATE where a unit is held, or has gradients. */
SLUICE_API sluice_status sluice_engine_replan(sluice_engine* engine, uint64_t reserved);
/* The plan that it has, as sluice_plan() gives it. */
SLUICE_API sluice_status sluice_engine_plan(const sluice_engine* engine, char** json);

/* Values. Every unit is given values once before it is acquired or saved; that may be repeated while it
 * is not held.
 * A function of the caller's is called with consecutive runs of elements of one parameter, by the calling
 * thread; it returns 0, or anything else to stop (SLUICE_CALLBACK; the unit must then be given values anew).
 * It may not call the engine (SLUICE_STATE). */

typedef int (*sluice_read_values)(void* context, uint32_t parameter, uint64_t first_element, float* values,
                                  uint64_t elements);
/* `values` fills in each parameter of the unit. The optimizer's state becomes zero. */
SLUICE_API sluice_status sluice_engine_set_values(sluice_engine* engine, uint32_t unit,
                                                  sluice_read_values values, void* context);
typedef int (*sluice_write_values)(void* context, uint32_t parameter, uint64_t first_element,
                                   const float* values, uint64_t elements);
/* The unit's values in f32 (of the masters where there are any); a pending update is applied before. */
SLUICE_API sluice_status sluice_engine_get_values(sluice_engine* engine, uint32_t unit,
                                                  sluice_write_values values, void* context);
/* All units from a folder of safetensors (a single file, or an index) or one such file, by the parameters'
 * names; in F32, F16 or BF16. Tensors that no parameter takes are ignored. SLUICE_NOT_FOUND, SLUICE_CORRUPT
 * and SLUICE_INVALID_ARGUMENT (another shape) name the tensor, before any value was changed. */
SLUICE_API sluice_status sluice_engine_load_values(sluice_engine* engine, const char* path);

/* The optimizer's state, by arrays: the f32 masters ("master"), where there are any, then the optimizer's own
 * as torch.optim names them, then those that are not by elements, as transformers names them (of Adafactor; a
 * parameter has some of these, in their own shapes). In f32, whatever type it is kept in. */

/* The names, as a JSON list, given to the caller. */
SLUICE_API sluice_status sluice_engine_state_arrays(const sluice_engine* engine, char** json);
typedef int (*sluice_write_state)(void* context, uint32_t parameter, uint32_t array, uint64_t first_element,
                                  const float* values, uint64_t elements);
/* Of a trainable unit, as sluice_engine_get_values(); runs of different arrays come by turns, from threads of
 * the engine's. */
SLUICE_API sluice_status sluice_engine_get_state(sluice_engine* engine, uint32_t unit,
                                                 sluice_write_state state, void* context);
typedef int (*sluice_read_state)(void* context, uint32_t parameter, uint32_t array, uint64_t first_element,
                                 float* values, uint64_t elements);
/* Fills in every array of the unit; parameters follow their masters, and keep their values where there are
 * none. */
SLUICE_API sluice_status sluice_engine_set_state(sluice_engine* engine, uint32_t unit,
                                                 sluice_read_state state, void* context);

/* Functions for the four above where values, or state, are whole arrays in memory. They take no lock: a
 * function of the caller's own that waits for a lock waits for ever where another thread holds it while it
 * touches a parameter that is absent (with options.serve_touches: that waits for the engine's turn), as a
 * thread of Python may hold the GIL. */
typedef struct sluice_array {
  void* data; /* all elements that the unit has of it; NULL: it is left out, and read as zeros */
  sluice_dtype dtype;
} sluice_array;
/* Their context. The arrays are the caller's, and not in the memory of the engine's parameters. */
typedef struct sluice_arrays {
  size_t size;
  uint32_t first_parameter, parameters; /* of the unit; others are left out */
  uint32_t arrays;                      /* of each parameter, in the engine's order; 1 for values */
  const sluice_array* data;             /* [parameters][arrays] */
} sluice_arrays;
SLUICE_API int sluice_write_values_to_arrays(void* context, uint32_t parameter, uint64_t first_element,
                                             const float* values, uint64_t elements);
SLUICE_API int sluice_read_values_from_arrays(void* context, uint32_t parameter, uint64_t first_element,
                                              float* values, uint64_t elements);
SLUICE_API int sluice_write_state_to_arrays(void* context, uint32_t parameter, uint32_t array,
                                            uint64_t first_element, const float* values, uint64_t elements);
SLUICE_API int sluice_read_state_from_arrays(void* context, uint32_t parameter, uint32_t array,
                                             uint64_t first_element, float* values, uint64_t elements);

/* How often a parameter was updated: the step that an optimizer's bias correction counts. */
SLUICE_API sluice_status sluice_engine_updates(const sluice_engine* engine, uint32_t parameter,
                                               uint64_t* updates);
SLUICE_API sluice_status sluice_engine_set_updates(sluice_engine* engine, uint32_t parameter,
                                                   uint64_t updates);

/* A step: sluice_engine_begin_step(), then for each unit in any order, as often as needed: acquire, compute,
 * add gradients, release; then sluice_engine_step(). The first step's order is recorded, and later ones are
 * fetched ahead by it; another order is right too, only slower. Outside a step units may be acquired for
 * reading. */

typedef struct sluice_group_settings {
  size_t size; /* the same in all of an array */
  double learning_rate;
  double weight_decay;
  /* settings[setting_count] that are others in this step than the engine was made with, of those that may
   * change. Momentum cannot come later, nor go (sgd; adafactor's beta1). */
  const sluice_setting* settings;
  size_t setting_count;
} sluice_group_settings;

typedef struct sluice_step_settings {
  size_t size;
  const sluice_group_settings* groups; /* [group_count]: as many as the engine was made for */
  size_t group_count;
  double clip;             /* bound of the global norm; 0: none */
  double gradient_factor;  /* gradients are multiplied by it before anything else (unscaling); 0: 1 */
  uint32_t keep_gradients; /* not 0: the next step adds to these gradients, unless they are dropped before */
  double clip_value; /* each element of a gradient is brought between -clip_value and it, after all of the
                      * above; 0: none. Also with options.update_in_backward, as it needs no other gradient */
} sluice_step_settings;

/* `settings`: with options.update_in_backward, where sluice_engine_step() takes none; otherwise NULL. */
SLUICE_API sluice_status sluice_engine_begin_step(sluice_engine* engine,
                                                  const sluice_step_settings* settings);

typedef enum sluice_access {
  SLUICE_READ = 0, /* its parameters */
  SLUICE_GRADIENT =
      1, /* its parameters, and gradients will be added; within a step, and not of a frozen unit */
  /* Only that gradients will be added; its parameters need not come. */
  SLUICE_GRADIENT_ONLY = 2,
  /* Its parameters, which the caller writes where they lie. When it is released they are its values; where
   * there are masters, those of the elements that were changed. */
  SLUICE_EDIT = 3
} sluice_access;

/* Makes the unit's parameters present, after a pending update of theirs; waits for the disk. Held until it is
 * released as often as it was acquired. SLUICE_STATE where more units would be held than the plan was made
 * for. */
SLUICE_API sluice_status sluice_engine_acquire(sluice_engine* engine, uint32_t unit, sluice_access access);
SLUICE_API sluice_status sluice_engine_release(sluice_engine* engine, uint32_t unit);
/* How the unit is held, what touches brought in apart: `accesses` has the bit 1 << SLUICE_READ, ... of each
 * access; `times` is how often it is to be released, 0 where it is not held. Either may be NULL. */
SLUICE_API sluice_status sluice_engine_held(const sluice_engine* engine, uint32_t unit, uint32_t* accesses,
                                            uint32_t* times);
/* Those that are, in the order of acquiring: at most `capacity`; `count` is how many there are. */
SLUICE_API sluice_status sluice_engine_held_units(const sluice_engine* engine, uint32_t* units,
                                                  size_t capacity, size_t* count);
/* Where the parameter lies: its elements one after another, in its type, the last dimension fastest. The
 * address stays the same for the engine's whole life; the memory may be read only while the unit is held, and
 * written only while it is held with SLUICE_EDIT. A read at another time ends the process with a message that
 * names the unit; with options.serve_touches it waits until a thread of the engine's has brought the unit in,
 * which then counts as one that is held until the next call on the engine; a write so counts as an edit. A
 * system call on absent memory gives EFAULT. */
SLUICE_API sluice_status sluice_engine_parameter(sluice_engine* engine, uint32_t parameter,
                                                 const void** data);
/* Adds all elements of a gradient to what the step has of this parameter so far. REQUIRES: its unit is held
 * with SLUICE_GRADIENT. A parameter that gets none in a step is left as it is by that step, as torch.optim
 * does. `gradient` may be memory of the engine's own parameters only while their unit is held
 * (SLUICE_INVALID_ARGUMENT otherwise). */
SLUICE_API sluice_status sluice_engine_add_gradient(sluice_engine* engine, uint32_t parameter,
                                                    const void* gradient, sluice_dtype dtype);

/* `has`: 1 where the parameter has a gradient, added in this step or kept; 0 where none is left of it. */
SLUICE_API sluice_status sluice_engine_has_gradient(const sluice_engine* engine, uint32_t parameter,
                                                    uint32_t* has);
/* Of a parameter that has a gradient (SLUICE_STATE otherwise), at any time until it is dropped. What is asked
 * for is brought in, and nothing else: `norm` (infinite where an element is not finite) and `multiply` need
 * no element. `data`: all elements in `dtype`, for the caller; not in a parameter's memory, unless its unit
 * is held with SLUICE_EDIT. A factor that comes after sluice_engine_step() is for later uses. */
SLUICE_API sluice_status sluice_engine_get_gradient(sluice_engine* engine, uint32_t parameter, void* data,
                                                    sluice_dtype dtype);
SLUICE_API sluice_status sluice_engine_gradient_norm(sluice_engine* engine, uint32_t parameter, double* norm);
SLUICE_API sluice_status sluice_engine_multiply_gradient(sluice_engine* engine, uint32_t parameter,
                                                         double factor);
/* The parameter has no gradient then; also where it had none. */
SLUICE_API sluice_status sluice_engine_drop_gradient(sluice_engine* engine, uint32_t parameter);

typedef struct sluice_step_result {
  size_t size;
  double gradient_norm; /* over all parameters, after gradient_factor and before clipping */
  double clip_factor;   /* by which they were multiplied then; 1: no clipping */
} sluice_step_result;

/* Updates every parameter that got a gradient, with a copy of the settings; where anything is on disk the
 * updates go on behind this call, and each is complete when its unit is next acquired. `result` may be NULL.
 * SLUICE_NOT_FINITE names a parameter: no value was changed, and the step is over. With
 * options.update_in_backward the updates were made already, `settings` is NULL, and it is
 * sluice_engine_release() that gives SLUICE_NOT_FINITE: that unit is left as it was. */
SLUICE_API sluice_status sluice_engine_step(sluice_engine* engine, const sluice_step_settings* settings,
                                            sluice_step_result* result);
/* The step is over without an update: its gradients are dropped, and every unit is released. For errors in
 * the middle. */
SLUICE_API sluice_status sluice_engine_abandon_step(sluice_engine* engine);
/* Waits until all updates are applied. */
SLUICE_API sluice_status sluice_engine_settle(sluice_engine* engine);
SLUICE_API sluice_status sluice_engine_steps(const sluice_engine* engine, uint64_t* steps);
/* `in_step`: 1 from sluice_engine_begin_step() until the step is over, else 0. */
SLUICE_API sluice_status sluice_engine_in_step(const sluice_engine* engine, uint32_t* in_step);
/* `text`: why the engine has failed, given to the caller; NULL where it has not. */
SLUICE_API sluice_status sluice_engine_failure(const sluice_engine* engine, char** text);

/* Writes a checkpoint of values and optimizer state into the folder `out`, as docs/formats/checkpoint.md
 * says: whole or not at all; the newest `keep` (0: all) stay. A folder that holds another run's checkpoints,
 * or later ones, is refused. `path`, where not NULL, is given to the caller: the checkpoint's folder. Between
 * steps. */
SLUICE_API sluice_status sluice_engine_save(sluice_engine* engine, const char* out, uint64_t keep,
                                            char** path);
/* Loads such a checkpoint: a folder that sluice_engine_save() gave, or `out` itself for the newest there.
 * Every byte is verified. SLUICE_CORRUPT and SLUICE_INVALID_ARGUMENT (another model, another optimizer) name
 * what is wrong. State of another type is converted. After an error that came when values had been changed
 * already the engine has failed. */
SLUICE_API sluice_status sluice_engine_load(sluice_engine* engine, const char* path);

/* ---- the ledger and the trace ---- */

typedef struct sluice_ledger_line {
  const char* tier;    /* "host", "disk": those that the machine has */
  const char* purpose; /* "parameter", "gradient", "optimizer state", ...; "total" for a tier's sum */
  uint64_t current, peak;
} sluice_ledger_line;

/* Fills in at most `capacity` lines; `count` is how many there are. The texts live as long as the library. */
SLUICE_API sluice_status sluice_engine_ledger(const sluice_engine* engine, sluice_ledger_line* lines,
                                              size_t capacity, size_t* count);
typedef struct sluice_counters {
  size_t size;
  double wait_seconds;      /* in which the caller waited for transfers */
  double optimizer_seconds; /* arithmetic of updates */
  uint64_t touches;         /* served; see options.serve_touches */
} sluice_counters;
/* Over the engine's life. */
SLUICE_API sluice_status sluice_engine_counters(const sluice_engine* engine, sluice_counters* counters);
/* What happened when, as Trace Event JSON (Perfetto opens it). SLUICE_STATE where none is kept. */
SLUICE_API sluice_status sluice_engine_save_trace(const sluice_engine* engine, const char* path);

#ifdef __cplusplus
}
#endif
#endif
