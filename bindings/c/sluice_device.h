/* Sluice's C ABI on a CUDA GPU. sluice.h includes this header.
 *
 * An engine with options.device_memory computes on a GPU: units in use are in the GPU's memory, and the
 * others in host memory and on disk, from where they are prefetched. adamw, adam, lion and sgd update on the
 * GPU, and on the CPU, while the GPU computes, for units where that saves copies; adafactor and muon update
 * on the CPU. The plan chooses by the machine's rates and says why, unless options.updates decides. The bits
 * are the same on both. A thread of the engine's runs the CPU's updates, and calls options.sgemm and
 * options.team while the caller goes on. A request that a GPU does not support is an error.
 *
 * It needs a GPU of compute capability 8.0 or later, NVIDIA's driver 580 or later, and libsluice_cuda.so with
 * its libsluice_kernels.fatbin beside libsluice_c.so. Where one of them is missing or unsuitable,
 * sluice_engine_create() returns SLUICE_NOT_FOUND, or SLUICE_IO for a GPU that is busy, with the remedy. The
 * environment variable SLUICE_CUDA_DRIVER may name a library to load in place of the driver's libcuda.so.1.
 * sluice_plan() needs no GPU.
 *
 * Budgets: options.device_memory bounds the GPU memory of the engine together with options.device_reserved,
 * the memory that the caller allocates there, and sluice_device_facts.base, the memory of CUDA's context with
 * Sluice's kernels (about half a GiB on large GPUs). options.memory and options.reserved concern host memory,
 * as without a GPU. SLUICE_BUDGET where the GPU has less memory than device_memory, or less is free than the
 * plan needs.
 *
 * Addresses: sluice_engine_parameter() gives addresses in GPU memory, which never change. The arrays of
 * sluice_engine_add_gradient() and sluice_engine_get_gradient() are in GPU memory, too. Values, state,
 * settings and results are in host memory.
 *
 * Order: the caller queues its work on one stream, and states it (sluice_engine_use_stream()). Work queued
 * there after sluice_engine_acquire() starts when the unit is present, and work queued before
 * sluice_engine_release() may use the unit until it ends; the calling thread waits for neither. Work on that
 * stream reads an added gradient, which may be freed in the stream's order, and writes the array of
 * sluice_engine_get_gradient().
 *
 * Graphs: while the caller captures that stream into a CUDA graph, calls that may queue work or wait return
 * SLUICE_STATE and do nothing, since replays would not repeat them. Allowed are questions,
 * sluice_engine_begin_step(), sluice_engine_multiply_gradients(), sluice_engine_set_updates(),
 * sluice_engine_add_event() and sluice_engine_save_trace(), and destroying an engine that holds no unit.
 * Other streams may be captured at any time, in any of CUDA's modes; where the caller's stream is CUDA's
 * default stream, only streams that were made non-blocking, as PyTorch's are.
 *
 * Waits: the calling thread waits for the disk; when acquiring a unit, for its update by the CPU; in
 * sluice_engine_step() and sluice_engine_gradient_norms(), for the gradients; and when loading or saving
 * values, state and checkpoints.
 *
 * Errors: with options.update_in_backward, sluice_engine_step() returns SLUICE_NOT_FINITE where a gradient
 * was not finite: that unit is unchanged, and the others are updated. A factor that is not finite is
 * SLUICE_NOT_FINITE in sluice_engine_release(). GPU work must not use an address of a unit that is not held:
 * its contents are undefined, or it is not mapped, which is an error of the GPU's. So options.serve_touches
 * is refused.
 *
 * Ranks: each has a GPU of its own. options.device is its index; with 0 it is that of the environment
 * variable LOCAL_RANK where that is set and the process sees several GPUs, and otherwise the first one, which
 * SLUICE_FIRST_DEVICE names in any case. Two ranks share a GPU if both name it so and give
 * options.device_facts, since a measurement beside another rank is wrong, and if their budgets fit;
 * otherwise two ranks on one GPU are an error. Either all ranks compute on GPUs, or all on the CPU. Where the
 * GPUs of one host access each other's memory, over NVLink or PCIe, they sum gradients and gather updated
 * partitioned state directly. Otherwise, on several hosts, too, NCCL carries these where it can be loaded and
 * is measured to be faster than what else joins the ranks, or with options.links "nccl". ($SLUICE_NCCL may
 * name its file. It takes memory of the GPU, which is counted as CUDA's.) Else, and with "host", or where a
 * step is predicted to be shorter so, they pass through registered host memory; so do gradients that wait in
 * host memory for updates by the CPU. With "gpus" or "nccl", a lack of that is an error (SLUICE_IO). GPUs of
 * one host copy partitioned parameters from the owner's shard: in the memory of GPUs that access each other
 * and update them there, if they fit; else in host memory that all ranks map, into which shards on disk are
 * read. The bits are those of ranks on the CPU.
 *
 * With options.stage for stage 2 or 3, and one of options.micro_batches for each rank, gradients are summed
 * in backward, and a rank keeps only its own part of each: they can be measured, multiplied and dropped, but
 * neither read nor added to until the step has ended (SLUICE_STATE). Unless "gpus" is requested, all ranks
 * use host memory where one GPU has too little memory for the data that other ranks read from it. That memory
 * stays allocated until the engines of all ranks have been destroyed.
 *
 * Not yet supported on a GPU, and refused: reproducible sums, parameters that span units,
 * sluice_engine_replan() and sluice_engine_leave().
 */
#ifndef SLUICE_DEVICE_H
#define SLUICE_DEVICE_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The facts by which a plan places parts of the model on a GPU and chooses the CPU's updates. They change no
 * bit of a result. sluice_engine_create() measures them, in about half a second and within the budgets,
 * unless they are stated here, all of them together. sluice_plan(), which needs no GPU, assumes typical
 * values instead of measuring. (Products of muon count as 50e9 operations a second unless measured.)
 * sluice_engine_device() returns the facts that an engine uses. SLUICE_INVALID_ARGUMENT for a rate that is
 * not positive and finite, and for seconds that are negative or not finite. */
struct sluice_device_facts {
  size_t size;
  /* Bytes a second of copies to the GPU alone, from it alone, and in both directions at once (their sum). */
  double to_gpu, from_gpu, both_ways;
  double gpu_updates; /* elements a second that updates on the GPU process */
  double cpu_memory;  /* bytes a second of CPU loops over memory during copies in both directions */
  uint64_t base;      /* GPU memory of a context with Sluice's kernels, in bytes */
  /* Seconds of the caller's own computation on the GPU in a step, by which the plan predicts a step's time.
   * 0: unknown. The engine does not measure it. */
  double computing;
  /* For ranks: bytes a second that a GPU reads from the memory of the host's other GPUs while all of them do,
   * or with options.links "nccl" receives by NCCL. 0: it is measured; sluice_plan() assumes that GPUs have no
   * such access. */
  double between_gpus;
};

/* Sets the CUstream on which the caller queues work from now on. The stream outlives the engine, unless
 * another one replaces it before. NULL is CUDA's default stream, which is the initial one. A caller that uses
 * several streams for one unit orders them itself. SLUICE_STATE where the CPU computes. */
SLUICE_API sluice_status sluice_engine_use_stream(sluice_engine* engine, void* stream);
/* Gives the caller the engine's plan, as sluice_engine_plan() does, with the predicted time of a step in
 * which the caller computes on the GPU for `computing` seconds, as it may have measured. SLUICE_STATE where
 * the CPU computes. */
SLUICE_API sluice_status sluice_engine_predict(const sluice_engine* engine, double computing, char** json);
/* Gives the caller a JSON object with the engine's GPU, its free memory, in "shared" whether another rank
 * computes on that GPU, and in "facts" the facts of its plan; `json` gets NULL where the CPU computes. */
SLUICE_API sluice_status sluice_engine_device(const sluice_engine* engine, char** json);

#ifdef __cplusplus
}
#endif
#endif
