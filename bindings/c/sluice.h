/* Sluice's C ABI: a model's parameters, gradients and optimizer state in stated memory and on disk.
 *
 * A caller describes its model as units (parameters that are needed together) and creates an engine within a
 * budget. In each step it acquires a unit, computes with its parameters where they lie, hands in gradients,
 * and releases the unit; at the end sluice_engine_step() updates all parameters. Parts that do not fit in
 * memory are brought from disk, and written back there. docs/architecture.md explains the words, and
 * examples/network.c is a whole program.
 *
 * Building: cc program.c $(pkg-config --cflags --libs sluice), or in CMake find_package(sluice REQUIRED) and
 * target_link_libraries(program PRIVATE sluice::sluice). A folder that the system does not search is named in
 * PKG_CONFIG_PATH, in CMAKE_PREFIX_PATH, and for the loader in LD_LIBRARY_PATH or the program's run path.
 *
 * Results: every function that can fail returns a status. Where it is not SLUICE_OK, outputs are unchanged,
 * and sluice_last_error() says on the same thread what was asked for, what was found and what to do.
 *
 * Threads: any thread may call every function. Calls on one engine take turns, also where one waits.
 *
 * Forks: engines, homes and ranks serve the process that made them, where their threads are. In a child that
 * a fork made of it, the _destroy functions return at once and leave everything to the parent, other calls on
 * an engine are SLUICE_STATE, and a touch of a parameter ends the child with a message. A child that is to
 * make engines of its own calls exec() first.
 *
 * Questions: functions that take a const sluice_engine change nothing, and an engine that has failed answers
 * them, too. A caller need not keep count of units that are held, of steps or of gradients.
 *
 * Ownership: what a _create function returns belongs to the caller, who frees it with the _destroy function
 * of the same name. A pointer that is handed in is used during the call only, unless its description says
 * otherwise. A text (char*) that is given to the caller is freed with sluice_text_destroy().
 *
 * Versions: a struct's first member is the size that it had when the caller was compiled (SLUICE_INIT sets
 * it). A member that a later version adds is 0 for an older caller, which means its default.
 * sluice_abi_version() changes where older callers would break.
 *
 * Strings are UTF-8. Sizes are in bytes, unless elements are mentioned.
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

/* A struct, zero but for its size: sluice_engine_options options = SLUICE_INIT(sluice_engine_options); */
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
  SLUICE_BUDGET = 3,           /* it does not fit in the stated memory or disk space */
  SLUICE_IO = 4,               /* the system refused or failed an operation */
  SLUICE_CORRUPT = 5,          /* what was read is not what was written, or is not in the expected format */
  SLUICE_NOT_FINITE = 6,       /* a gradient is infinite or not a number; no parameter was changed */
  SLUICE_STATE = 7,            /* the call is not allowed now, or the engine has failed */
  SLUICE_INTERNAL = 8,         /* a defect in Sluice */
  SLUICE_CALLBACK = 9          /* a function of the caller returned something other than 0 */
} sluice_status;

typedef enum sluice_dtype { SLUICE_F32 = 0, SLUICE_BF16 = 1, SLUICE_F16 = 2 } sluice_dtype;
/* Types of the optimizer's state; docs/optimizers.md describes them. */
typedef enum sluice_state_type {
  SLUICE_STATE_F32 = 0,
  SLUICE_STATE_BF16 = 1,
  SLUICE_STATE_8BIT = 2 /* codes, with an f32 scale for each 256 */
} sluice_state_type;

/* The text of the calling thread's last failure, valid until its next one; "" where there was none. */
SLUICE_API const char* sluice_last_error(void);
SLUICE_API uint32_t sluice_abi_version(void);
SLUICE_API const char* sluice_version(void); /* "0.1.0" */
/* Frees a text that a function gave to the caller. NULL is allowed. */
SLUICE_API void sluice_text_destroy(char* text);

/* The process's resident memory now, and its peak; either may be NULL. Memory of other ranks that this
 * process has mapped is not counted, since its owner's budget has it. */
SLUICE_API sluice_status sluice_process_memory(uint64_t* resident, uint64_t* peak);

/* ---- the model: units and parameters ---- */

typedef struct sluice_model sluice_model;

typedef struct sluice_parameter {
  size_t size;
  const char* name;      /* its name in checkpoints; unique in the model */
  const uint64_t* shape; /* [dimensions]; none is 0 */
  size_t dimensions;     /* 0: the parameter has one element */
  uint32_t group;        /* parameter group: an index into sluice_step_settings.groups */
  uint32_t frozen;       /* not 0: it is never updated; all parameters of a unit are frozen, or none is */
  /* A large parameter may span several consecutive units. Each of these units has one parameter: a span that
   * follows the span in the unit before, with the same name and shape. Each span has a number of its own, by
   * which other functions refer to it; its elements are counted from its first one. All spans but the last
   * have a multiple of SLUICE_SPAN_GRAIN elements, and their memory is adjacent, so that the whole parameter
   * is one array. Adafactor, and muon where the parameter is not by_elements, update all spans together: in a
   * step, either all of them have a gradient or none has (otherwise sluice_engine_step() returns
   * SLUICE_STATE). Where span_elements is 0, the unit has the whole parameter. */
  uint64_t span_first, span_elements;
  sluice_dtype dtype; /* one for the whole unit; types narrower than f32 have an f32 master (see no_master) */
  uint32_t by_elements; /* not 0: muon leaves the parameter to AdamW, which suits embeddings and heads */
} sluice_parameter;
#define SLUICE_SPAN_GRAIN 1048576u

SLUICE_API sluice_status sluice_model_create(sluice_model** model);
/* An engine keeps its own copy of the model. NULL is allowed. */
SLUICE_API void sluice_model_destroy(sluice_model* model);
/* Units are numbered from 0 in the order in which they are added. The order of a forward pass is best. */
SLUICE_API sluice_status sluice_model_add_unit(sluice_model* model, const char* name, uint32_t* unit);
/* Adds a parameter to the unit that was added last. Parameters are numbered from 0 over all units. */
SLUICE_API sluice_status sluice_model_add_parameter(sluice_model* model, const sluice_parameter* parameter,
                                                    uint32_t* id);

/* ---- the plan ---- */

/* sgemm_ of a BLAS with 32-bit integers: columns are contiguous, and every argument is an address. */
typedef void (*sluice_sgemm)(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                             const int* k, const float* alpha, const float* a, const int* lda, const float* b,
                             const int* ldb, const float* beta, float* c, const int* ldc);

/* Calls work(data) on up to `threads` threads at once, one of them the caller, and returns when all have
 * ended. `flags` is 0. libgomp's GOMP_parallel() is such a function. */
typedef void (*sluice_team)(void (*work)(void* data), void* data, unsigned threads, unsigned flags);

typedef struct sluice_folder {
  const char* path; /* where `limit` is 0 also "FOLDER:SIZE", as the program takes it ("/scratch:20GiB") */
  uint64_t limit;   /* the most space to take; 0: what is free, less a twentieth */
} sluice_folder;

/* A setting of an optimizer, such as {"beta1", 0.9, NULL}. docs/optimizers.md has the settings of each
 * optimizer, and sluice_optimizer_settings() returns them. A setting that is not given has the optimizer's
 * default. A name that the optimizer does not have, a setting that is given twice and a value out of range
 * are SLUICE_INVALID_ARGUMENT; the text says what is allowed. */
typedef struct sluice_setting {
  const char* name;
  double number;    /* 0 or 1 for a switch */
  const char* text; /* for a choice; otherwise NULL */
} sluice_setting;
/* Gives the caller a JSON object that has a list of settings for each optimizer, with all about them. */
SLUICE_API sluice_status sluice_optimizer_settings(char** json);
/* Returns whether an engine would accept these settings. */
SLUICE_API sluice_status sluice_optimizer_check(const char* optimizer, const sluice_setting* settings,
                                                size_t setting_count);
/* The ranks that train a model together; see sluice_ranks.h, which this header includes. */
typedef struct sluice_ranks sluice_ranks;
#define SLUICE_STAGE(number) ((number) + 1u)
#define SLUICE_FIRST_DEVICE UINT32_MAX
/* The known facts of a GPU; see sluice_device.h, which this header includes. */
typedef struct sluice_device_facts sluice_device_facts;
typedef struct sluice_engine_options {
  size_t size;
  uint64_t memory;   /* for the whole process, including the caller's own memory (`reserved`) */
  uint64_t reserved; /* memory that the caller will still allocate: activations, workspace, gradients */
  const sluice_folder* disk; /* [disk_folders], striped, for what does not fit in memory */
  size_t disk_folders;
  uint32_t threads;      /* compute threads for updates; 0: the cores that this process may use */
  uint32_t held_units;   /* the most units that are held at once; 0: one */
  uint32_t groups;       /* parameter groups; 0: one */
  uint64_t trace_events; /* number of latest events kept for sluice_engine_save_trace(); 0: none */
  uint32_t prefetch;     /* how many accesses are fetched ahead, at most 64; 0: the plan chooses */
  /* "memory" or "disk" (or "device", with device_memory), for tests and measurements; NULL: the plan chooses.
   */
  const char* place_parameters;
  const char* place_gradients;
  const char* place_state;
  uint64_t given_back;    /* bytes held now that the process frees before the last unit has its values */
  uint32_t serve_touches; /* not 0: page faults on absent units are served; see sluice_engine_parameter() */
  /* "adamw", "adam", "lion", "sgd", "adafactor", "muon"; NULL: "adamw". See docs/optimizers.md */
  const char* optimizer;
  const sluice_setting* settings; /* [setting_count], for the optimizer */
  size_t setting_count;
  sluice_state_type state; /* the type of the optimizer's arrays */
  uint32_t no_master;      /* not 0: SLUICE_BF16 parameters have no masters, and are rounded stochastically */
  uint64_t seed;           /* for that rounding */
  /* Not 0: a unit is updated as soon as it is released with gradients, and its gradients are never stored.
   * Each parameter then gets one gradient in a step, sluice_engine_begin_step() takes the settings, gradients
   * are not clipped by norm, and none is kept. With ranks: see sluice_engine_end_micro_batch(). */
  uint32_t update_in_backward;
  /* A BLAS of the caller, for muon's matrix products. It takes its memory from `reserved`, and the threads
   * that call the engine call it, one at a time (with device_memory, a thread of the engine's). NULL: the
   * matrix library that is installed beside this one is loaded; SLUICE_NOT_FOUND where that fails. */
  sluice_sgemm sgemm;
  /* The thread team that runs the engine's loops, on every thread that calls the engine: for a caller whose
   * own loops use this team and whose threads spin while they wait, like those of OpenMP. NULL: threads of
   * its own. */
  sluice_team team;
  sluice_ranks* ranks; /* the ranks with the same units; outlives the engine. NULL: there are no others */
  uint32_t stage;      /* what is partitioned: SLUICE_STAGE(0) to SLUICE_STAGE(3); 0: the plans choose */
  uint32_t planned_rank, planned_ranks; /* for sluice_plan() where `ranks` is NULL: a rank, and of how many */
  uint32_t reproducible, micro_batches; /* see sluice_engine_end_micro_batch(); 0: not */
  /* For an engine that computes on a GPU: see sluice_device.h. */
  uint64_t device_memory;   /* the budget of the GPU's memory; 0: the CPU computes */
  uint64_t device_reserved; /* the part of it that the engine leaves to CUDA and to the caller */
  uint32_t device;     /* the GPU's index among those that this process may use; see sluice_device.h for 0 */
  const char* updates; /* the device of updates then, "gpu" or "cpu"; NULL: the plan chooses, unit by unit */
  const sluice_device_facts* device_facts; /* NULL: measured, and assumed by sluice_plan() */
  const char* links; /* of ranks on GPUs: "gpus", "nccl" or "host"; NULL: what was measured decides */
  /* The engine has some of the model's units, and engines of other ranks the others: see sluice_pipeline.h.
   */
  sluice_ranks* sections;
  const uint32_t* section_units; /* [the number of these ranks times section_chunks] */
  uint32_t section_chunks;       /* of the units of each; 0: one */
  /* Called by the calling thread from time to time while it plans and takes memory. Anything but 0 stops the
   * call (SLUICE_CALLBACK; of ranks SLUICE_STATE, on all of them), and nothing is taken. It must not call the
   * library. NULL: nothing stops it. */
  int (*stop)(void* context);
  void* stop_context;
  const char* sum_gradients; /* over ranks: "step" or "each_backward", see sluice_ranks.h; NULL: "step" */
} sluice_engine_options;

/* Gives the caller a JSON object that says where every byte would live, without taking any, as `sluice plan
 * --json` prints it; with ranks, the plan of this one, which asks no other. SLUICE_BUDGET where the model
 * does not fit: the text says which budget is short, by how much, and what would fit. */
SLUICE_API sluice_status sluice_plan(const sluice_model* model, const sluice_engine_options* options,
                                     char** json);

/* ---- the engine ---- */

typedef struct sluice_engine sluice_engine;

/* Takes all memory and disk space of the plan. Parameters have no values yet. */
SLUICE_API sluice_status sluice_engine_create(const sluice_model* model, const sluice_engine_options* options,
                                              sluice_engine** engine);
/* Waits for transfers that are under way. Addresses of parameters become invalid. NULL is allowed. */
SLUICE_API void sluice_engine_destroy(sluice_engine* engine);
/* The addresses of a unit whose engine is gone. */
typedef struct sluice_home sluice_home;
/* For a caller that refers to parameters after the engine's end: gives the caller homes[number of units],
 * each of which keeps the addresses of its unit until it is destroyed. With `with_values` not 0, pending
 * updates are applied, and the values stay at their addresses, in their type, in ordinary memory that may be
 * written; the engine frees its own memory for it on the way. With 0, a touch of the addresses ends the
 * process with a message that names the unit; an engine that has failed can be left so, too. Gradients and
 * optimizer state are dropped. Afterwards the engine can only be destroyed. Errors that change nothing:
 * SLUICE_BUDGET (with `with_values`) where it needs more than the budget or the system has, together with
 * `besides` bytes that the caller allocates meanwhile; SLUICE_STATE where the parameters have left already,
 * or (with `with_values`) where a unit is held or has no values. After any other failure homes are given, and
 * units that had not left by then have no values. homes NULL: only finds out whether it would fit. */
SLUICE_API sluice_status sluice_engine_leave(sluice_engine* engine, uint32_t with_values, uint64_t besides,
                                             sluice_home** homes);
/* Any thread may call it, once for each home. NULL is allowed. */
SLUICE_API void sluice_home_destroy(sluice_home* home);
/* Makes and applies another plan, for a caller that will allocate `reserved` (counted as options.reserved is,
 * from what the process held when the engine was created). Parts with another tier in the new plan are moved;
 * values and addresses stay, and the stated memory is not exceeded meanwhile. It may be called between steps,
 * when every unit has values. Errors that change nothing: SLUICE_BUDGET where no plan fits, or where the disk
 * has no space for what would leave memory; SLUICE_STATE where a unit is held, or has gradients. */
SLUICE_API sluice_status sluice_engine_replan(sluice_engine* engine, uint64_t reserved);
/* Gives the caller the engine's present plan, as sluice_plan() does. */
SLUICE_API sluice_status sluice_engine_plan(const sluice_engine* engine, char** json);

/* Values. Every unit is given values before it is first acquired or saved, and may be given others whenever
 * it is not held. The calling thread calls the function that is handed in, for consecutive runs of elements
 * of one parameter. The function returns 0, or anything else to stop the call (SLUICE_CALLBACK; the unit must
 * then be given values anew). It must not call the engine (SLUICE_STATE). */

typedef int (*sluice_read_values)(void* context, uint32_t parameter, uint64_t first_element, float* values,
                                  uint64_t elements);
/* The function fills in each parameter of the unit. The optimizer's state becomes zero. */
SLUICE_API sluice_status sluice_engine_set_values(sluice_engine* engine, uint32_t unit,
                                                  sluice_read_values values, void* context);
typedef int (*sluice_write_values)(void* context, uint32_t parameter, uint64_t first_element,
                                   const float* values, uint64_t elements);
/* Applies a pending update, and then hands the unit's values to the function in f32 (those of the masters
 * where there are any). */
SLUICE_API sluice_status sluice_engine_get_values(sluice_engine* engine, uint32_t unit,
                                                  sluice_write_values values, void* context);
/* Loads all units, by the names of parameters, from a folder of safetensors files (one file, or an index) or
 * from one file, in F32, F16 or BF16. Tensors of other names are ignored. SLUICE_NOT_FOUND, SLUICE_CORRUPT
 * and SLUICE_INVALID_ARGUMENT (another shape) name the tensor, before any value is changed. */
SLUICE_API sluice_status sluice_engine_load_values(sluice_engine* engine, const char* path);

/* The optimizer's state is a list of arrays: the f32 masters ("master"), where there are any; the optimizer's
 * arrays by elements, under the names that torch.optim has for them; and those that are not by elements (of
 * Adafactor: a parameter has some of them, in shapes of their own), under the names that transformers has.
 * Functions see them in f32, in whatever type they are kept. */

/* Gives the caller the names of the arrays, as a JSON list. */
SLUICE_API sluice_status sluice_engine_state_arrays(const sluice_engine* engine, char** json);
typedef int (*sluice_write_state)(void* context, uint32_t parameter, uint32_t array, uint64_t first_element,
                                  const float* values, uint64_t elements);
/* Hands the state of a trainable unit to the function, as sluice_engine_get_values() hands values; runs of
 * several arrays alternate, and threads of the engine call the function, one at a time. */
SLUICE_API sluice_status sluice_engine_get_state(sluice_engine* engine, uint32_t unit,
                                                 sluice_write_state state, void* context);
/* The same by rank 0 of several, which makes this call alone: see sluice_ranks.h. */
SLUICE_API sluice_status sluice_engine_get_state_alone(sluice_engine* engine, uint32_t unit,
                                                       sluice_write_state state, void* context);
/* Tells the other ranks that rank 0 has taken the state so, or why it could not (an error's text; NULL: it
 * has). Another rank waits in this call until rank 0 makes it. */
SLUICE_API sluice_status sluice_engine_state_is_taken(sluice_engine* engine, const char* error);
typedef int (*sluice_read_state)(void* context, uint32_t parameter, uint32_t array, uint64_t first_element,
                                 float* values, uint64_t elements);
/* The function fills in every array of the unit. Parameters get the values of their masters; where there are
 * no masters they keep their values. */
SLUICE_API sluice_status sluice_engine_set_state(sluice_engine* engine, uint32_t unit,
                                                 sluice_read_state state, void* context);

/* sluice_arrays.h has functions to hand to the four calls above, for whole arrays in memory. */

/* How often a parameter was updated: the step count of an optimizer's bias correction; at most 2^53. */
SLUICE_API sluice_status sluice_engine_updates(const sluice_engine* engine, uint32_t parameter,
                                               uint64_t* updates);
SLUICE_API sluice_status sluice_engine_set_updates(sluice_engine* engine, uint32_t parameter,
                                                   uint64_t updates);

/* A step begins with sluice_engine_begin_step(). Then units are acquired, computed with, given gradients and
 * released, in any order and as often as needed, until sluice_engine_step(). The order of a step is recorded,
 * and the next step fetches ahead by it; another order gives the same results, only more slowly. Outside a
 * step units may be acquired for reading. */

typedef struct sluice_group_settings {
  size_t size; /* the same in all entries of an array */
  double learning_rate;
  double weight_decay;
  /* [setting_count]: settings that differ in this step from those that the engine was created with. Only some
   * may change, and momentum (sgd; beta1 of adafactor) can neither begin nor end. */
  const sluice_setting* settings;
  size_t setting_count;
} sluice_group_settings;

typedef struct sluice_step_settings {
  size_t size;
  const sluice_group_settings* groups; /* [group_count]: as many as options.groups */
  size_t group_count;
  double clip;             /* bound of the norm of all gradients; 0: none */
  double gradient_factor;  /* multiplies all gradients first (unscaling); 0: 1 */
  uint32_t keep_gradients; /* not 0: the next step adds to these gradients, unless they are dropped */
  /* Bound of each element's absolute value, after all of the above; 0: none. It may be set with
   * options.update_in_backward, too, since it needs no other gradient. */
  double clip_value;
} sluice_step_settings;

/* `settings`: with options.update_in_backward, where sluice_engine_step() takes none; otherwise NULL. */
SLUICE_API sluice_status sluice_engine_begin_step(sluice_engine* engine,
                                                  const sluice_step_settings* settings);

typedef enum sluice_access {
  SLUICE_READ = 0, /* parameters will be read */
  /* Parameters will be read and gradients added. Only within a step, and not for a frozen unit. */
  SLUICE_GRADIENT = 1,
  SLUICE_GRADIENT_ONLY = 2, /* gradients will be added; parameters need not be present */
  /* The caller writes parameters where they lie, which become the unit's values when it is released. Masters
   * change only for elements that were changed. */
  SLUICE_EDIT = 3
} sluice_access;

/* Makes the unit's parameters present, after its pending update; waits for the disk. It is held until it is
 * released as often as it was acquired. SLUICE_STATE where more than options.held_units would be held. */
SLUICE_API sluice_status sluice_engine_acquire(sluice_engine* engine, uint32_t unit, sluice_access access);
SLUICE_API sluice_status sluice_engine_release(sluice_engine* engine, uint32_t unit);
/* Tells how the unit is held, not counting page faults: `accesses` gets the bits 1 << SLUICE_READ, ..., and
 * `times` how often to release it (0: it is not held). Either may be NULL. */
SLUICE_API sluice_status sluice_engine_held(const sluice_engine* engine, uint32_t unit, uint32_t* accesses,
                                            uint32_t* times);
/* Gives at most `capacity` of the units that are held, in the order of acquiring, and how many there are. */
SLUICE_API sluice_status sluice_engine_held_units(const sluice_engine* engine, uint32_t* units,
                                                  size_t capacity, size_t* count);
/* Gives the address of a parameter: its elements lie one after another, in its type, the last dimension
 * fastest. The address is the same for the engine's whole life. The memory may be read only while the unit is
 * held, and written only while it is held with SLUICE_EDIT. A touch at another time ends the process with a
 * message that names the unit. With options.serve_touches the touching thread instead waits until the engine
 * has brought the unit in, which then counts as held until the next call on the engine; a write counts as an
 * edit. A system call on absent memory fails with EFAULT. */
SLUICE_API sluice_status sluice_engine_parameter(sluice_engine* engine, uint32_t parameter,
                                                 const void** data);
/* Installs the handler of SIGSEGV that serves touches anew, for a caller that has let another library install
 * its own, or put an earlier one back. sluice_engine_acquire() does so, too. */
SLUICE_API sluice_status sluice_catch_touches(void);
/* Adds a gradient, with all of its elements, to what this step has of the parameter. REQUIRES: its unit is
 * held with SLUICE_GRADIENT or SLUICE_GRADIENT_ONLY. A step leaves a parameter without a gradient unchanged,
 * as torch.optim does. `gradient` may lie in the memory of the engine's own parameters only while their unit
 * is held (otherwise SLUICE_INVALID_ARGUMENT). */
SLUICE_API sluice_status sluice_engine_add_gradient(sluice_engine* engine, uint32_t parameter,
                                                    const void* gradient, sluice_dtype dtype);

/* `has` gets 1 where the parameter has a gradient, added in this step or kept; otherwise 0. */
SLUICE_API sluice_status sluice_engine_has_gradient(const sluice_engine* engine, uint32_t parameter,
                                                    uint32_t* has);
/* These work on gradients, which are there until they are dropped; SLUICE_STATE where a parameter has none.
 * Only sluice_engine_get_gradient() brings elements into memory. `data` gets all of them in `dtype`; it must
 * not lie in a parameter's memory, unless its unit is held with SLUICE_EDIT. The others go through `count`
 * parameters in order, and an error leaves those before it done. A norm is NaN where an element is, else
 * infinite where one is. A factor that is given after sluice_engine_step() does not change that update. */
SLUICE_API sluice_status sluice_engine_get_gradient(sluice_engine* engine, uint32_t parameter, void* data,
                                                    sluice_dtype dtype);
SLUICE_API sluice_status sluice_engine_gradient_norms(sluice_engine* engine, const uint32_t* parameters,
                                                      size_t count, double* norms);
SLUICE_API sluice_status sluice_engine_multiply_gradients(sluice_engine* engine, const uint32_t* parameters,
                                                          size_t count, double factor);
/* Drops the gradients of those of the parameters that have one. */
SLUICE_API sluice_status sluice_engine_drop_gradients(sluice_engine* engine, const uint32_t* parameters,
                                                      size_t count);

typedef struct sluice_step_result {
  size_t size;
  double gradient_norm; /* over all parameters, after gradient_factor and before clipping */
  double clip_factor;   /* the factor that clipping multiplied them by; 1: no clipping */
} sluice_step_result;

/* Ends the step: updates every parameter that has a gradient, with a copy of the settings. Where anything is
 * on disk, updates go on after this call, and each is complete when its unit is next acquired. `result` may
 * be NULL. SLUICE_NOT_FINITE names a parameter: no value was changed, and the step is over. With
 * options.update_in_backward the updates were made already, `settings` is NULL, and it is
 * sluice_engine_release() that returns SLUICE_NOT_FINITE, leaving that unit as it was. */
SLUICE_API sluice_status sluice_engine_step(sluice_engine* engine, const sluice_step_settings* settings,
                                            sluice_step_result* result);
/* Ends the step without an update, drops its gradients and releases every unit. For errors in a step. */
SLUICE_API sluice_status sluice_engine_abandon_step(sluice_engine* engine);
/* Waits until all updates are applied. */
SLUICE_API sluice_status sluice_engine_settle(sluice_engine* engine);
SLUICE_API sluice_status sluice_engine_steps(const sluice_engine* engine, uint64_t* steps);
/* `in_step` gets 1 from sluice_engine_begin_step() until the step is over, otherwise 0. */
SLUICE_API sluice_status sluice_engine_in_step(const sluice_engine* engine, uint32_t* in_step);
/* `text` gets why it has failed, given to the caller; NULL where it has not. */
SLUICE_API sluice_status sluice_engine_failure(const sluice_engine* engine, char** text);

/* Writes a checkpoint of values and optimizer state into the folder `out`, as docs/formats/checkpoint.md
 * describes it: whole or not at all. The newest `keep` checkpoints stay; 0: all. A folder with checkpoints of
 * another run, or later ones, is refused. Where `path` is not NULL, it gets the checkpoint's folder, given to
 * the caller. Between steps only. */
SLUICE_API sluice_status sluice_engine_save(sluice_engine* engine, const char* out, uint64_t keep,
                                            char** path);
/* Loads such a checkpoint: `path` is a folder that sluice_engine_save() gave, or `out`, which means the
 * newest whole checkpoint there, by manifests and lengths of files; a warning on standard error names those
 * that are not whole. Every byte is verified as it is read. SLUICE_CORRUPT and SLUICE_INVALID_ARGUMENT
 * (another model, another optimizer) name what is wrong. State of another type is converted. An error that
 * comes after values were changed leaves the engine failed. */
SLUICE_API sluice_status sluice_engine_load(sluice_engine* engine, const char* path);

/* ---- the ledger and the trace ---- */

typedef struct sluice_ledger_line {
  const char* tier;    /* "host" or "disk", and "device" where a GPU computes */
  const char* purpose; /* "parameter", "gradient", "optimizer state", ...; "total" for a tier's sum */
  uint64_t current, peak;
} sluice_ledger_line;

/* Gives at most `capacity` lines; `count` gets how many there are. The texts live as long as the library. */
SLUICE_API sluice_status sluice_engine_ledger(const sluice_engine* engine, sluice_ledger_line* lines,
                                              size_t capacity, size_t* count);
typedef struct sluice_counters {
  size_t size;
  double wait_seconds;      /* how long callers waited for transfers */
  double optimizer_seconds; /* how long updates were computed */
  uint64_t touches;         /* number of page faults served; see options.serve_touches */
} sluice_counters;
/* Counts over the engine's life. */
SLUICE_API sluice_status sluice_engine_counters(const sluice_engine* engine, sluice_counters* counters);
/* Adds to the trace what the client did: a pass in the lane "compute", a wait in "rank wait", or a message in
 * "message". begin, end: nanoseconds of CLOCK_MONOTONIC. Nothing happens where no trace is kept. */
SLUICE_API sluice_status sluice_engine_add_event(sluice_engine* engine, const char* lane, const char* name,
                                                 uint64_t begin, uint64_t end, uint64_t bytes);
/* Writes the trace as Trace Event JSON, which Perfetto opens. SLUICE_STATE where none is kept. */
SLUICE_API sluice_status sluice_engine_save_trace(const sluice_engine* engine, const char* path);

#ifdef __cplusplus
}
#endif
#include "sluice_arrays.h"
#include "sluice_device.h"
#include "sluice_files.h"
#include "sluice_pipeline.h"
#include "sluice_ranks.h"
#endif
