/* Sluice's C ABI for pipeline parallelism: a model's units are divided among ranks, which send activations
 * and gradients to each other. sluice.h includes this header. docs/guide/pipelines.md explains pipelines.
 *
 * Each rank creates an engine of the same model, with options.sections and options.section_units: the number
 * of consecutive units of each rank's section, in order, at least one each. With options.section_chunks a
 * section has several chunks of consecutive units: the first chunks of all sections come first, then the
 * second ones. An engine numbers its own units and parameters from 0. Checkpoints contain the whole model, so
 * that any number of sections can load them.
 * With sections these functions are collective: sluice_engine_create(); sluice_engine_step(), whose norm is
 * that of all sections' gradients; and sluice_engine_save(), for which each rank sees the folder `out` of
 * rank 0. A rank that fails ends the work of all, as in sluice_ranks.h; SLUICE_NOT_FINITE is returned on all
 * ranks, and ends nothing.
 *
 * Where several ranks have the same section, these are options.ranks, and options.sections are the ranks with
 * the other sections: both are groups of the same ranks, which form a mesh (sluice_ranks_along()). Then
 * sluice_engine_create() and sluice_engine_save() are collective over all of them, and rank 0 is the first of
 * all; the rules of sluice_ranks.h for gradients and partitioned state apply to options.ranks. Where a step
 * finds a difference among these, the other sections do not learn of it: a caller that continues must tell
 * them.
 */
#ifndef SLUICE_PIPELINE_H
#define SLUICE_PIPELINE_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the caller the actions of a pipeline stage in a step, as a JSON list of [action, item, chunk of the
 * stage]: "receive_input", "forward", "send_output", "receive_gradient", "backward", "send_gradient" (and,
 * with zb-h1, "weights"). Receives and sends are asynchronous and begin at these points, receives before any
 * action that could wait for them. Actions of a chunk ascend by items. order: "gpipe", "1f1b" or "zb-h1".
 * chunks: of each stage; with more than one stages are interleaved. SLUICE_INVALID_ARGUMENT for other words,
 * for no items, stages or chunks, and for several chunks with zb-h1. */
SLUICE_API sluice_status sluice_pipeline_actions(const char* order, uint32_t stages, uint32_t chunks,
                                                 uint64_t items, uint32_t stage, char** json);
/* Gives the caller the blocks of each stage's chunks, as a JSON list of [first, end]: those of the first
 * chunks of all stages, then of the second ones. work[blocks + 2]: the cost of the part before the first
 * block, of each block, and of the part after the last one. cut: "0-7,8-15"; NULL: chosen so that a step is
 * short, and each chunk has work. SLUICE_INVALID_ARGUMENT where the cut does not fit the blocks or the
 * stages. */
SLUICE_API sluice_status sluice_pipeline_stages(const char* order, uint32_t stages, uint32_t chunks,
                                                uint64_t items, const char* cut, const double* work,
                                                size_t blocks, char** json);

/* ---- messages between two ranks ---- */

/* Messages with the same name between the same two ranks arrive in the order of the calls, and have equal
 * sizes at both ends. Both functions return at once. The bytes stay valid and untouched until
 * sluice_message_wait(), which ends the message, even when it returns an error. */
typedef struct sluice_message sluice_message;
SLUICE_API sluice_status sluice_ranks_send(sluice_ranks* ranks, uint32_t to, const char* name,
                                           const void* data, uint64_t bytes, sluice_message** message);
SLUICE_API sluice_status sluice_ranks_receive(sluice_ranks* ranks, uint32_t from, const char* name,
                                              void* data, uint64_t bytes, sluice_message** message);
SLUICE_API sluice_status sluice_message_wait(sluice_message* message);

#ifdef __cplusplus
}
#endif
#endif
