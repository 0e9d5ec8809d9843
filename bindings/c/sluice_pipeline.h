/* Sluice's C ABI for pipelines: a model's units are cut over ranks, which pass what is computed to each
 * other. sluice.h includes this header. docs/guide/pipelines.md describes what pipelines are.
 *
 * Each rank creates an engine of the same model, with options.sections and options.section_units: how many of
 * the model's units the first of these ranks has, how many of those after them the second one, and so on, one
 * at least. Units and parameters of an engine are those of its own, from 0 on; saving and loading a
 * checkpoint are of the whole model, so that any number of sections can go on from it. Then these are
 * collective: sluice_engine_create(), sluice_engine_step(), whose norm is that of all sections' gradients,
 * and sluice_engine_save(), for which each rank sees the folder `out` of rank 0. A rank that fails ends the
 * work of all, as in sluice_ranks.h; SLUICE_NOT_FINITE is returned on all ranks, and ends nothing.
 *
 * Where several ranks have the same section, options.ranks are these, and options.sections those with the
 * other sections: both are groups of the same ranks, of which they make a mesh (sluice_ranks_along()). Then
 * sluice_engine_create() and sluice_engine_save() are collective over all of them, and rank 0 is that of all;
 * what sluice_ranks.h says of gradients and of partitioned state holds for options.ranks. A difference that a
 * step finds among these is unknown to the other sections: a caller that goes on after it tells them.
 */
#ifndef SLUICE_PIPELINE_H
#define SLUICE_PIPELINE_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the caller what a stage of a pipeline does in a step, as a JSON list of [what, item]:
 * "receive_input", "forward", "send_output", "receive_gradient", "backward", "send_gradient" (and, with
 * zb-h1, "weights"). Receives and sends are begun there, receives before anything that could wait for them.
 * order: "gpipe", "1f1b" or "zb-h1". SLUICE_INVALID_ARGUMENT for other words, and for no items or stages. */
SLUICE_API sluice_status sluice_pipeline_actions(const char* order, uint32_t stages, uint64_t items,
                                                 uint32_t stage, char** json);
/* Gives the caller the blocks of each stage, as a JSON list of [first, end]. work[blocks + 2]: what each
 * block takes, after what is before the first one, and followed by what is after the last one. cut:
 * "0-7,8-15"; NULL: it is chosen so that a step is short, and each stage has work. SLUICE_INVALID_ARGUMENT
 * where it does not fit the blocks or the stages. */
SLUICE_API sluice_status sluice_pipeline_stages(const char* order, uint32_t stages, uint64_t items,
                                                const char* cut, const double* work, size_t blocks,
                                                char** json);

/* ---- messages between two ranks ---- */

/* Messages of one name from one rank to another arrive in the order of the calls, and have as many bytes at
 * both ends. Both functions return at once. The bytes stay valid and unused until sluice_message_wait(),
 * which ends the message, also where it returns an error. */
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
