/* Sluice's C ABI on a GPU of CUDA. sluice.h includes this header.
 *
 * An engine with options.device_memory computes on a GPU: what is used lies in the GPU's memory, and the rest
 * in the host's and on disk, from where it comes ahead of its use. Updates are made on the GPU, by adamw,
 * adam, lion and sgd, and for units whose copies that saves on the CPU, while the GPU computes; adafactor and
 * muon are the CPU's. The plan chooses by the machine's rates and says why, or options.updates says it. Bits
 * are the same on both. A thread of the engine's makes the CPU's, and calls options.sgemm and options.team
 * while the caller goes on. What a GPU does not have is an error.
 *
 * It needs a GPU of compute capability 8.0 or later, NVIDIA's driver 580 or later, and libsluice_cuda.so with
 * its libsluice_kernels.fatbin beside libsluice_c.so. Where one of them is missing, or does not fit,
 * sluice_engine_create() returns SLUICE_NOT_FOUND, or SLUICE_IO for a GPU that is busy, with what to do about
 * it. The environment variable SLUICE_CUDA_DRIVER names another file than the driver's (libcuda.so.1).
 * sluice_plan() needs no GPU.
 *
 * Budgets: options.device_memory bounds what the engine takes of the GPU's memory, together with
 * options.device_reserved, what the caller allocates there, and with what CUDA's context and Sluice's kernels
 * take (about half a GiB on large GPUs): sluice_device_facts.base. options.memory and options.reserved are
 * the host's, as ever. SLUICE_BUDGET where the GPU has less than device_memory, or less is free than the plan
 * takes.
 *
 * Addresses: sluice_engine_parameter() gives addresses in the GPU's memory, which never change. The arrays of
 * sluice_engine_add_gradient() and sluice_engine_get_gradient() are in the GPU's memory, too. Values, state,
 * settings and results are the host's.
 *
 * Order: the caller queues its work on a stream, and says on which (sluice_engine_use_stream()). What it
 * queues there after sluice_engine_acquire() begins when the unit is there, and what it has queued before
 * sluice_engine_release() has the unit until it ends: its thread waits for neither. A gradient is read by
 * work that is queued on that stream, and may be freed in the stream's order; sluice_engine_get_gradient()
 * writes in it. While the caller captures that stream into a graph of CUDA's, calls that may queue something
 * or wait are SLUICE_STATE, and do nothing, since replays would not do it again: all but questions,
 * sluice_engine_begin_step(), sluice_engine_multiply_gradients(), sluice_engine_set_updates(), and
 * sluice_engine_save_trace(). The engine may end then, if it holds no unit. Other streams may be captured at
 * any time, in any of CUDA's modes; where the caller's is CUDA's default stream, only those that were made
 * non-blocking, as PyTorch's are. The thread waits for the disk, for an update by the CPU where it acquires
 * the unit, in sluice_engine_step() and sluice_engine_gradient_norms() for the gradients, and where values,
 * state and checkpoints are loaded and saved. With options.update_in_backward it is sluice_engine_step() that
 * returns SLUICE_NOT_FINITE where a gradient was not finite: its unit is as it was then, and the others are
 * updated. A factor that is not finite is SLUICE_NOT_FINITE in sluice_engine_release(). An address of a unit
 * that is not held must not be used by work: it shows anything, or nothing is there, which is an error of the
 * GPU's. So options.serve_touches is refused.
 *
 * Ranks: each may have a GPU, as options.device says; two of them may have one together, if their budgets fit
 * and options.device_facts is given, since what is measured beside another rank is wrong. Either all ranks
 * compute on GPUs, or all on the CPU. Where the GPUs of one host read each other's memory, by NVLink or PCIe,
 * they add up gradients, and gather what partitioned state has updated, themselves; with options.links
 * "host", or where they cannot, or where a step is predicted to be shorter so, these go through registered
 * memory of the host, and so they do for what waits in the host for updates by the CPU. "gpus" makes it an
 * error that they cannot (SLUICE_IO). GPUs of one host copy partitioned parameters from where each rank has
 * its shard: in memory of the GPUs that read each other's, which update them there, if they fit; else in host
 * memory that all ranks map. Bits are those of ranks on the CPU, at either. With options.stage for stage 2 or
 * 3, and options.micro_batches one for each rank, gradients are summed in backward, and a rank keeps its own
 * part alone of each: they can be measured, multiplied and dropped, but not read, nor added to, until the
 * step has ended (SLUICE_STATE). Unless "gpus" is asked for, all ranks use the host's memory where one's GPU
 * has too little for what others read of it. That stays taken until the engines of all ranks have ended.
 *
 * Not yet on a GPU, and refused: reproducible sums, parameters that span units, sluice_engine_replan() and
 * sluice_engine_leave().
 */
#ifndef SLUICE_DEVICE_H
#define SLUICE_DEVICE_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a plan for a GPU is made by: which parts of the model are where, and what the CPU updates. They change
 * no bit of a result. sluice_engine_create() measures them, in about half a second and in memory within the
 * budgets, unless they are stated here; then all of them are. sluice_plan(), which needs no GPU, assumes
 * others where none are stated. (Products of muon are counted at 50e9 operations a second unless measured.)
 * What an engine has measured sluice_engine_device() says. SLUICE_INVALID_ARGUMENT for a rate that is not
 * above 0 and finite, and for seconds that are not 0 or more and finite. */
struct sluice_device_facts {
  size_t size;
  /* Bytes a second: copies to the GPU alone, from it alone, and both ways at once, where both count. */
  double to_gpu, from_gpu, both_ways;
  double gpu_updates; /* elements a second that the GPU updates in its memory */
  double cpu_memory;  /* bytes a second that loops of the CPU read and write, while copies go both ways */
  uint64_t base;      /* the bytes of the GPU's memory that a context with Sluice's kernels takes */
  /* Seconds that the caller computes on the GPU in a step, by which the plan says how long a step takes. 0:
   * not known. Nobody measures it for the engine. */
  double computing;
  /* Of ranks on one host: bytes a second that a GPU reads of the others' memory, while all of them do. 0: it
   * is measured, and by sluice_plan() taken for that GPUs do not do that. */
  double between_gpus;
};

/* Says on which CUstream the caller queues work from now on; it outlives the engine, or another one takes its
 * place before. NULL is CUDA's default stream, which is also the one at first. Where the caller uses several
 * streams for one unit, it orders them itself. SLUICE_STATE where the CPU computes. */
SLUICE_API sluice_status sluice_engine_use_stream(sluice_engine* engine, void* stream);
/* Gives the caller the engine's plan, as sluice_engine_plan() does, with how long a step takes in which the
 * caller computes on the GPU for so many seconds, as it may have measured since. SLUICE_STATE where the CPU
 * computes. */
SLUICE_API sluice_status sluice_engine_predict(const sluice_engine* engine, double computing, char** json);
/* Gives the caller a JSON object that says on which GPU the engine computes, how much of its memory is free,
 * and in "facts" by what its plan was made; `json` gets NULL where the CPU computes. */
SLUICE_API sluice_status sluice_engine_device(const sluice_engine* engine, char** json);

#ifdef __cplusplus
}
#endif
#endif
