/* Sluice's C ABI for several ranks: processes (or threads) that train one model together. sluice.h includes
 * this header, and has the rules for all functions. docs/ranks.md explains ranks.
 *
 * Each rank makes a sluice_ranks, states it in sluice_engine_options.ranks, and creates an engine of the same
 * model. In a step each rank computes its own micro-batches and adds their gradients. At its first use a
 * gradient becomes the mean over all ranks: their sum in f32, pairwise (0 + 1, 2 + 3, ..., then the sums of
 * these, and so on; an odd last one is carried up), times 1 / N in f32. sluice_engine_step(),
 * sluice_engine_get_gradient(), sluice_engine_gradient_norms() and sluice_engine_multiply_gradients() use
 * gradients. The first of these calls sums all gradients that were added, and waits until every other rank
 * has made such a call. A parameter with a gradient on some ranks only counts as zeros on the others.
 * Gradients that are added after the sums, or to kept ones, are averaged at the next use and then added.
 * Where state is partitioned (stage 1 and higher), a rank gets only the sums of its own shard, from which
 * norms, factors and steps are computed. sluice_engine_get_gradient(), and adding to a gradient that was used
 * or kept, gather the whole gradient, and wait until every other rank uses gradients or steps; SLUICE_STATE
 * on all of them where one has dropped it.
 *
 * Collective functions are called by every rank, in the same order, and wait for the others. For an engine
 * with ranks these are: sluice_engine_create(), sluice_engine_step(), sluice_engine_set_values(),
 * sluice_engine_set_state(), sluice_engine_load_values(), sluice_engine_load(), sluice_engine_save(),
 * sluice_engine_get_state(), sluice_engine_leave() with values, and releasing a unit that was held with
 * SLUICE_EDIT. A rank may call every other function alone, at any stage: to evaluate, to generate, or to save
 * values with sluice_engine_get_values(). Where state is partitioned (stage 1 and higher):
 * - sluice_engine_get_values() hands out the parameters instead of their masters.
 * - sluice_engine_get_state() hands the state only to the function of rank 0.
 * - sluice_engine_get_state_alone() does so while the other ranks make no call: rank 0 reads their parts,
 * which they give while they compute or wait, as soon as they have applied the updates that rank 0 has. On
 * them it does nothing. SLUICE_STATE where one of them has ended its engine, has set or edited values since,
 * or has not made a change within half a minute that rank 0 has made. With a GPU all ranks call
 * sluice_engine_get_state().
 * - sluice_engine_state_is_taken() follows on rank 0, also where it failed. Another rank that is to wait
 * until rank 0 has the state calls it, too: it returns when rank 0 has made the call as often since the last
 * step as this rank. SLUICE_STATE, with rank 0's text, where that failed.
 * - sluice_engine_step() waits until all updates are applied.
 * At every stage sluice_engine_save() writes one complete checkpoint: all ranks write parts of it where they
 * see rank 0's `out` under their own, otherwise rank 0 writes it alone. All ranks return when it is complete,
 * with the folder of rank 0; `keep` of the other ranks is ignored. Any number of ranks can load it, each from
 * a folder that it can read.
 *
 * Values: all ranks give the engine the same ones. sluice_ranks_broadcast() sends those of rank 0 to the
 * others. Every rank makes the same edits, or the next sluice_engine_step() returns SLUICE_STATE on all of
 * them and names the unit; whether the values are equal is not checked.
 *
 * Errors: where ranks differ in what can be compared (the model, the optimizer, the settings of a step, how
 * often they added gradients, factors), the function returns the same error on all of them. A rank that fails
 * ends the work of all: every function that waits returns SLUICE_IO, SLUICE_CORRUPT or SLUICE_STATE on every
 * rank, and the text names the rank that failed first, and why. The callers then destroy the engines, and
 * resume from the last checkpoint.
 */
#ifndef SLUICE_RANKS_H
#define SLUICE_RANKS_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A rank's membership in the run. It has threads of its own, so the process must not fork afterwards. It
 * serves one engine, possibly by its groups, and is destroyed after that engine. Any thread may call its
 * functions, but those that wait for all ranks come in one order, from one thread at a time: two ranks that
 * wait for each other in different ones fail after 5 seconds. */

typedef struct sluice_ranks_options {
  size_t size;
  double silence;  /* seconds without a packet after which a rank has failed; 0: 30 */
  double patience; /* seconds after which a live rank that does not take part has failed; 0: 600 */
} sluice_ranks_options;

/* ---- ranks of one machine ---- */

/* Creates the shared memory through which `ranks` (2 to 64) ranks of this machine exchange bytes.
 * `descriptor` gets its file descriptor, which is close-on-exec, and which the caller closes. The memory has
 * no name: other processes get it by fork(), by a message over a socket, or, where they may trace this
 * process, by opening /proc/PID/fd/N for reading and writing. */
SLUICE_API sluice_status sluice_ranks_memory(uint32_t ranks, int* descriptor);
/* Joins as rank `rank`. The descriptor stays the caller's, and may be closed afterwards. Waits for no other
 * rank. `options` may be NULL. The other ranks detect a rank that never joins after `patience`, and the end
 * of a rank's process at once. SLUICE_STATE where the rank has joined before; SLUICE_CORRUPT where the
 * descriptor is of no such memory. */
SLUICE_API sluice_status sluice_ranks_create_local(int descriptor, uint32_t rank,
                                                   const sluice_ranks_options* options, sluice_ranks** ranks);

/* ---- ranks that mpirun or srun has started ---- */

/* Joins as the rank that the launcher has assigned to this process. Collective: waits until all processes of
 * the launcher have called it. `options` may be NULL. Ranks of one machine share memory, others exchange
 * packets through MPI (Open MPI 4). A process calls it once, and does not use MPI otherwise. Where ranks are
 * on several machines, the thread that has called it destroys the ranks before main() ends, which finalizes
 * MPI. SLUICE_STATE where no launcher has started the process, where it has started only one, and where MPI
 * was initialized before; SLUICE_NOT_FOUND where libsluice_mpi.so or Open MPI is missing; SLUICE_IO where a
 * rank does not join. */
SLUICE_API sluice_status sluice_ranks_create_mpi(const sluice_ranks_options* options, sluice_ranks** ranks);

/* ---- ranks that the caller connects ---- */

/* Functions of the caller that move packets: short arrays of bytes, which arrive unchanged, exactly once, and
 * in order between any two ranks. A function returns 0, or another value where it failed, which ends the work
 * of all ranks; `what` names the transport in error texts. One thread, which sluice_ranks_create_links()
 * starts, calls send, receive, wait and gone, one at a time; with `host` also the thread that calls
 * sluice_ranks_create_links(), before that other one starts. Any thread calls wake, also while another
 * function runs. destroy is called last and once, by sluice_ranks_destroy(), while no other function runs;
 * where all ranks turn out to share memory, by sluice_ranks_create_links(). No function may call Sluice, or
 * wait for a thread that waits for Sluice. (If a page fault on an absent parameter, see
 * sluice_engine_parameter(), waits for other ranks' data while a function does not return for `silence`
 * seconds, the process ends with an error that names the unit.)
 *
 * With `host`, ranks of one host exchange packets through shared memory, and these functions only connect
 * hosts: gradients are summed on a host before they are sent, and gathered data and partitioned parameters
 * are sent to a host once. Where the processes of a host cannot share memory (other users, other containers),
 * they use the functions among each other, too, and the log says why.
 */
typedef struct sluice_links {
  size_t size;
  void* context;         /* passed to each function */
  const char* what;      /* the transport's name, such as "the process group"; copied */
  uint32_t rank, ranks;  /* this rank, and how many there are: 2 or more */
  uint64_t packet_bytes; /* the largest packet, in bytes: at least 96; 65536 or more is best */
  /* Sends the two parts, one after the other, as one packet. `sent` is 0 initially; the function sets it to 1
   * if it took the packet, and leaves it where there is no room now. The caller may reuse both parts
   * afterwards. */
  int (*send)(void* context, uint32_t to, const void* head, size_t head_bytes, const void* body,
              size_t body_bytes, uint32_t* sent);
  /* Copies the next packet of rank `from` into `packet`, which has room for packet_bytes. `bytes` is 0
   * initially, and stays 0 where there is no packet now. It does not wait. */
  int (*receive)(void* context, uint32_t from, void* packet, size_t* bytes);
  /* Waits until a packet may have arrived, there may be room again, a rank may be gone, wake was called since
   * the last wait, or `microseconds` have passed. It may return earlier. */
  int (*wait)(void* context, uint64_t microseconds);
  void (*wake)(void* context);
  /* `how` stays NULL where the rank may be alive, or has not joined yet. Otherwise it gets a text that lives
   * as long as the links, as in "its process has ended", and `in_order` becomes 1 if that rank's destroy was
   * called. All packets that it has sent can still be received. */
  int (*gone)(void* context, uint32_t rank, const char** how, uint32_t* in_order);
  /* Tells the other ranks that this one has left in order. Packets sent before still arrive. */
  void (*destroy)(void* context);
  /* A name that is the same on ranks of one host, and differs between hosts; NULL on all ranks: none share
   * memory. */
  const char* host;
} sluice_links;

/* Joins over the caller's functions. With links.host it is collective, waits until all ranks have called it,
 * and needs links.packet_bytes of at least 2048. If it fails, destroy is not called. `options` may be NULL.
 * */
SLUICE_API sluice_status sluice_ranks_create_links(const sluice_links* links,
                                                   const sluice_ranks_options* options, sluice_ranks** ranks);

/* Leaves the run; the other ranks can continue as long as they need nothing from this one. NULL is allowed.
 * REQUIRES: no engine uses it, and its groups are destroyed. */
SLUICE_API void sluice_ranks_destroy(sluice_ranks* ranks);

/* ---- ranks on a mesh ---- */

/* `mesh` gives the axes of all ranks and their sizes: "data=2,pipeline=4". Consecutive ranks differ in the
 * last axis. `group` gets the ranks that differ from this one only along `axis`, including this one, as ranks
 * of their own: they are numbered by their places along the axis, and their collective calls are among them
 * only. NULL where this rank is alone there. Nothing is sent; each rank may make it, and destroys it before
 * `ranks`, whose links and threads it uses. sluice_ranks_failure(), sluice_ranks_fail() and
 * sluice_ranks_traffic() of a group concern all ranks. A NULL for `ranks` means that there is one rank.
 * SLUICE_INVALID_ARGUMENT where the mesh has another number of ranks. */
SLUICE_API sluice_status sluice_ranks_along(sluice_ranks* ranks, const char* mesh, const char* axis,
                                            sluice_ranks** group);

/* ---- micro-batches ---- */

/* options.micro_batches is the number of micro-batches of a step over all ranks, a multiple of the number of
 * ranks. A rank ends each of its own by sluice_engine_end_micro_batch(), or, with options.reproducible,
 * numbers them by sluice_engine_set_micro_batch(). Gradients are then summed over ranks while these compute:
 * in a rank's last micro-batch of a step, the sum of a unit's gradients begins when
 * sluice_engine_end_gradients() states that this rank adds nothing more to them, if the plan has them in
 * memory. (On GPUs all ranks begin sums in the order in which rank 0 made these calls in the step before: a
 * rank delays a sum until it has come to all earlier ones.) The function does not wait. The end of that
 * micro-batch is a use of gradients: it waits for the other ranks, which contribute to all sums what they
 * have, and gradients are then their mean. A gradient added to a unit after its sum has begun is added to the
 * mean, and waits for the other ranks. So does dropping its gradients; ranks that did not drop them, too,
 * then get an error (SLUICE_STATE), since they have used gradients that this rank will not complete, and drop
 * the step's gradients as well. In a step with fewer or more micro-batches, the remaining gradients are
 * summed at the next use. Where all gradients of a rank were dropped, its micro-batches of the step start
 * again. An engine without ranks accepts sluice_engine_end_gradients() and sluice_engine_end_micro_batch(),
 * and does nothing. SLUICE_STATE: outside of a step; where options.micro_batches is not set.
 *
 * With options.reproducible not 0, also for an engine without ranks, gradients are added pairwise over the
 * micro-batches of all ranks, neighbours first, and a gradient is the mean over all micro-batches of the
 * step. So its bits do not depend on the number of ranks. Each rank has an equal number of consecutive
 * micro-batches, in the order of ranks. It ends all of them before gradients are used, and adds at most one
 * gradient of a parameter in each; sums begin at the first use. For each gradient the engine keeps sums that
 * wait for their neighbours, up to log2 of the number of a rank's micro-batches; its plan counts them.
 * SLUICE_STATE, with nothing changed, also: after all micro-batches have ended; from
 * sluice_engine_add_gradient() for a second gradient in a micro-batch or one of an earlier micro-batch, for
 * one after the last micro-batch, and for one that is added to a used or kept gradient; and from functions
 * that use gradients, on all ranks, while a rank has not ended all micro-batches. options.update_in_backward
 * is refused with it. The caller ensures that ranks compute alike (CPU, threads, libraries).
 *
 * With options.sum_gradients "each_backward" at a stated stage 2 or 3, ranks sum each micro-batch's gradients
 * in its backward pass, in the order and by the calls of the next paragraph, and a rank adds its own part of
 * the mean to what it keeps. So it never has more than a few whole gradients, while what is sent is as often
 * as many as it has micro-batches. The written order is then over ranks, and after that over micro-batches:
 * with several of each rank the bits differ from those without it. Gradients may be measured and multiplied
 * between micro-batches and before the step, and dropped there on all ranks alike. They cannot be read, and a
 * step whose sums have begun cannot be abandoned (SLUICE_STATE).
 *
 * With options.update_in_backward on several ranks, options.micro_batches is their number: a step has one
 * micro-batch on each. A unit's gradients are summed once this rank holds it no more, while ranks compute,
 * and their mean is applied. All ranks sum units in one order: in the first step the reverse of that in which
 * rank 0 has read them (SLUICE_READ), and then that in which it had their gradients in the step before. A
 * unit that rank 0 leaves out keeps its place; at first this is the reverse of its declaration.
 * sluice_engine_release() waits for slower ranks: until all have come to the unit before. A rank that does
 * not have its gradients (an expert) comes to it when it has those of two other units.
 * sluice_engine_end_micro_batch(), with no unit held, contributes zeros for the gradients that this rank does
 * not have, and waits for all ranks; sluice_engine_step() does so if the caller has not. SLUICE_STATE: from
 * sluice_engine_add_gradient() for a gradient that comes after its sum, as where a rank has gradients in
 * another order; from functions that read, measure or multiply gradients. Sums cannot be undone: where a mean
 * is not finite (SLUICE_NOT_FINITE), and where a rank abandons a step in which it has summed anything, the
 * engines of all ranks have failed, with an error that names the cause.
 */
SLUICE_API sluice_status sluice_engine_end_gradients(sluice_engine* engine, uint32_t unit);
SLUICE_API sluice_status sluice_engine_end_micro_batch(sluice_engine* engine);
/* Says of which micro-batch the gradients are that are added from now on. It takes the place of
 * sluice_engine_end_micro_batch() where micro-batches overlap, as in a stage of a pipeline, and needs
 * options.reproducible. `number` counts this rank's micro-batches of the step from 0, and may be set in any
 * order, but each parameter gets its gradients in ascending order. If `number` is how many micro-batches this
 * rank has, all of them have ended. SLUICE_STATE: outside of a step; for a larger number; without
 * options.reproducible. */
SLUICE_API sluice_status sluice_engine_set_micro_batch(sluice_engine* engine, uint32_t number);

/* ---- questions ---- */

SLUICE_API sluice_status sluice_ranks_rank(const sluice_ranks* ranks, uint32_t* rank);
SLUICE_API sluice_status sluice_ranks_size(const sluice_ranks* ranks, uint32_t* size);
/* `text` gets which rank failed first, and why, given to the caller; NULL if none has failed. */
SLUICE_API sluice_status sluice_ranks_failure(const sluice_ranks* ranks, char** text);
typedef struct sluice_traffic {
  size_t size;
  uint64_t sent, received;                 /* of gradients, parameters, state and broadcasts */
  uint64_t sent_besides, received_besides; /* all other bytes */
  uint64_t received_from_hosts;            /* the part of `received` from other hosts */
} sluice_traffic;
/* Counts since it was made. */
SLUICE_API sluice_status sluice_ranks_traffic(const sluice_ranks* ranks, sluice_traffic* traffic);

/* ---- what callers tell each other ---- */

/* Collective. `name` identifies a call in error texts; calls with the same name are made in the same order on
 * all ranks, and a caller should use few names. */

#define SLUICE_MOST_EXCHANGED 65536u
/* Each rank gives `bytes` bytes, at most SLUICE_MOST_EXCHANGED. `all` gets the bytes of all ranks, one after
 * another in the order of ranks, given to the caller, who frees it with sluice_text_destroy(); sizes[ranks]
 * gets their sizes. */
SLUICE_API sluice_status sluice_ranks_exchange(sluice_ranks* ranks, const char* name, const void* own,
                                               size_t bytes, char** all, size_t* sizes);
/* Replaces data[bytes] by those of rank 0. Any size, the same on all ranks. */
SLUICE_API sluice_status sluice_ranks_broadcast(sluice_ranks* ranks, const char* name, void* data,
                                                uint64_t bytes);
SLUICE_API sluice_status sluice_ranks_barrier(sluice_ranks* ranks, const char* name);
/* Not collective: ends the work of all ranks; their errors name this rank and `text`. */
SLUICE_API sluice_status sluice_ranks_fail(sluice_ranks* ranks, const char* text);

#ifdef __cplusplus
}
#endif
#endif
