/* Sluice's C ABI for several ranks: processes (or threads) that train one model together. sluice.h includes
 * this header, and says what holds for every function. docs/ranks.md describes what ranks are.
 *
 * Each rank makes a sluice_ranks, states it in sluice_engine_options.ranks, and creates an engine of the same
 * model. In a step each computes micro-batches of its own and adds their gradients. From its first use on, a
 * gradient is that of all ranks: their sum in f32, pairwise (0 + 1, 2 + 3, ..., then the sums of these, and
 * so on; an odd last one is carried up), times 1 / N in f32. sluice_engine_step(),
 * sluice_engine_get_gradient(), sluice_engine_gradient_norms() and sluice_engine_multiply_gradients() use
 * gradients. The first of them takes the sums of all gradients that were added, and waits until every other
 * rank has called one of them. A parameter that has a gradient on some ranks only counts as zeros on the
 * others. Gradients that are added after the sums, or to kept ones, are averaged at the next use and then
 * added. Where state is partitioned (stage 1 and higher), a rank gets the sums of its own shard alone, with
 * which norms, factors and steps are computed.
 * sluice_engine_get_gradient(), and adding to a gradient that was used or kept, bring all of it, for which
 * they wait until every other rank uses gradients or steps; SLUICE_STATE on all of them where one has dropped
 * it.
 *
 * Collective functions are those that every rank calls, in the same order. They wait for the others. Of an
 * engine with ranks these are: sluice_engine_create(), sluice_engine_step(), sluice_engine_set_values(),
 * sluice_engine_set_state(), sluice_engine_load_values(), sluice_engine_load(), sluice_engine_save(),
 * sluice_engine_get_state(), sluice_engine_leave() with values, and releasing a unit that was held with
 * SLUICE_EDIT. A rank may call every other function alone, at any stage: to evaluate, to generate, or to save
 * values with sluice_engine_get_values(). Where state is partitioned (stage 1 and higher):
 * - sluice_engine_get_values() hands in the parameters, and not their masters.
 * - sluice_engine_get_state() hands the state to the function of rank 0 alone.
 * - sluice_engine_step() waits until all updates are applied.
 * At every stage sluice_engine_save() writes one checkpoint, which holds the whole of everything: all ranks
 * write parts of it where they see rank 0's `out` under their own, otherwise rank 0 writes it alone. All
 * return when it is whole, with the folder of rank 0; `keep` of the other ranks is not used. Any number of
 * ranks can load it, each from a folder that it can read.
 *
 * Values: all ranks give the engine the same ones. sluice_ranks_broadcast() brings those of rank 0 to the
 * others. An edit is made alike by every rank, or the next sluice_engine_step() returns SLUICE_STATE on all
 * of them and names the unit; that the values are the same is not checked.
 *
 * Errors: where ranks differ in what can be compared (the model, the optimizer, the settings of a step, how
 * often they added gradients, factors) the function returns the same error on all of them. One rank that
 * fails ends the work of all: every function that waits returns SLUICE_IO, SLUICE_CORRUPT or SLUICE_STATE on
 * every rank, and the text names the rank that failed first, and why. What is left is to destroy the engines,
 * and to go on from the last checkpoint.
 */
#ifndef SLUICE_RANKS_H
#define SLUICE_RANKS_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One rank's part in the work of all. It has threads of its own, so a process does not fork after it has made
 * one. It serves one engine, be it by groups of it, and is destroyed after that engine. Any thread may call
 * its functions. */

typedef struct sluice_ranks_options {
  size_t size;
  double silence;  /* seconds without a sign of life after which a rank has failed; 0: 30 */
  double patience; /* seconds after which a rank that lives and does not take part has failed; 0: 600 */
} sluice_ranks_options;

/* ---- ranks of one machine ---- */

/* Makes the memory through which `ranks` (2 to 64) ranks of this machine exchange bytes. `descriptor` gets a
 * file descriptor of it, which the caller closes, and which is closed on exec(). It has no name: other
 * processes get it by fork(), by a message over a socket, or, where they may trace this process, by opening
 * /proc/PID/fd/N for reading and writing. */
SLUICE_API sluice_status sluice_ranks_memory(uint32_t ranks, int* descriptor);
/* Joins as that rank. The descriptor stays the caller's, and may be closed afterwards. Waits for nobody.
 * `options` may be NULL. A rank that never joins is found by patience, and one whose process ends at once.
 * SLUICE_STATE where the rank has joined before; SLUICE_CORRUPT where it is no such memory. */
SLUICE_API sluice_status sluice_ranks_create_local(int descriptor, uint32_t rank,
                                                   const sluice_ranks_options* options, sluice_ranks** ranks);

/* ---- ranks that mpirun or srun has started ---- */

/* Joins as the rank that the launcher has made of this process. Collective: waits until all its processes
 * have called it. `options` may be NULL. Ranks of one machine share memory, others exchange packets through
 * MPI (Open MPI 4). A process calls it once, and does not use MPI otherwise. Where ranks are on several
 * machines, the thread that has called it destroys the ranks, before the end of main(); MPI ends then.
 * SLUICE_STATE where no launcher has started the process, where it has started only one, and where MPI was
 * begun before; SLUICE_NOT_FOUND where libsluice_mpi.so or Open MPI is missing; SLUICE_IO where a rank does
 * not come. */
SLUICE_API sluice_status sluice_ranks_create_mpi(const sluice_ranks_options* options, sluice_ranks** ranks);

/* ---- ranks that the caller connects ---- */

/* Functions of the caller that move packets: short arrays of bytes, which arrive unchanged, once, and in
 * order between each two ranks. Each returns 0, or anything else where it failed, which ends the work of all
 * ranks; `what` names the cause in texts. One thread, which sluice_ranks_create_links() starts, calls send,
 * receive, wait and gone, one at a time; with `host` also the thread that calls that function, before the
 * other one begins. wake is called from any thread, also while another function runs. destroy is called last
 * and once, on the thread that calls sluice_ranks_destroy(), and no other function runs then or later; where
 * all ranks turn out to share memory, sluice_ranks_create_links() calls it. No function may call Sluice, or
 * wait for a thread that waits for Sluice. (Where a touch, see sluice_engine_parameter(), waits for what
 * other ranks have, and a function does not return for `silence` seconds, the process ends with an error that
 * names the unit.)
 *
 * With `host`, ranks of one host exchange packets through memory that they share, and these functions join
 * hosts alone: gradients are added on a host before they are sent, and what is gathered, and parameters that
 * are partitioned, come to a host once. Where the processes of a host cannot share memory (other users, other
 * containers), they use the functions among each other, too, and the log says why. */
typedef struct sluice_links {
  size_t size;
  void* context;         /* is handed to each function */
  const char* what;      /* "the process group": what the functions use; copied */
  uint32_t rank, ranks;  /* this rank, and how many there are: 2 or more */
  uint64_t packet_bytes; /* the most bytes that a packet may have: 96 or more; 65536 and more is best */
  /* Sends a packet, which consists of these two parts, one after the other. `sent` is 0 and stays 0 where
   * there is no room now, and becomes 1 where the packet was taken. Both parts may change when it returns. */
  int (*send)(void* context, uint32_t to, const void* head, size_t head_bytes, const void* body,
              size_t body_bytes, uint32_t* sent);
  /* Copies the next packet of that rank into `packet`, which has room for packet_bytes. `bytes` is 0 and
   * stays 0 where there is none now. It does not wait. */
  int (*receive)(void* context, uint32_t from, void* packet, size_t* bytes);
  /* Waits until a packet may have arrived, there may be room again, a rank may be gone, wake was called since
   * the last wait, or so many microseconds are over. It may return earlier. */
  int (*wait)(void* context, uint64_t microseconds);
  void (*wake)(void* context);
  /* `how` stays NULL where the rank may be alive, or has not begun yet. Otherwise it gets a text that lives
   * as long as the links, as in "its process has ended", and `in_order` becomes 1 where that rank's destroy
   * was called. All packets that it sent can still be received. */
  int (*gone)(void* context, uint32_t rank, const char** how, uint32_t* in_order);
  /* Tells the others that this rank has left in order. Packets that were sent still arrive. */
  void (*destroy)(void* context);
  /* A name that ranks of one host have alike, and others do not; NULL on all ranks: none share memory. */
  const char* host;
} sluice_links;

/* Joins over the caller's functions. With links.host it is collective, and waits until all ranks have called
 * it; links.packet_bytes is 2048 or more then. Where it fails, destroy is not called. `options` may be NULL.
 */
SLUICE_API sluice_status sluice_ranks_create_links(const sluice_links* links,
                                                   const sluice_ranks_options* options, sluice_ranks** ranks);

/* Leaves; the others can work on as long as they need nothing of this rank. NULL is allowed. REQUIRES: no
 * engine has it, and its groups are destroyed. */
SLUICE_API void sluice_ranks_destroy(sluice_ranks* ranks);

/* ---- ranks on a mesh ---- */

/* `mesh` names the axes of all ranks, and how many they have along each: "data=2,pipeline=4". Ranks that
 * follow each other differ in the last axis. `group` gets the ranks that differ from this one along `axis`
 * alone, with this one, as ranks of their own: their numbers are their places along the axis, and collective
 * calls are so among them. NULL where this rank is alone there. Nothing is sent; each rank may make it, and
 * destroys it before `ranks`, whose links and threads it uses. sluice_ranks_failure(), sluice_ranks_fail()
 * and sluice_ranks_traffic() of a group are those of all ranks. `ranks` NULL: there is one.
 * SLUICE_INVALID_ARGUMENT where the mesh is of another number of ranks. */
SLUICE_API sluice_status sluice_ranks_along(sluice_ranks* ranks, const char* mesh, const char* axis,
                                            sluice_ranks** group);

/* ---- micro-batches ---- */

/* options.micro_batches says how many micro-batches a step has over all ranks, a multiple of their number,
 * each of which a rank ends by sluice_engine_end_micro_batch(). Then ranks sum gradients beside what is
 * computed: in a rank's last micro-batch of a step the sum of a unit's gradients begins when
 * sluice_engine_end_gradients() says that this rank adds nothing more to them in this micro-batch, where the
 * plan has them in memory. (On GPUs all ranks begin sums in the order in which rank 0 has called it in the
 * step before: a rank begins none that stand behind one to which it has not come.) The function waits for
 * nobody. The end of that micro-batch is a use of gradients:
 * it waits for the other ranks, which join in all sums with what they have, and gradients are their mean
 * then. What is added to a unit after its sum has begun is added to the mean, and waits for the others; so
 * does dropping its gradients, after which the others that did not do the same have an error (SLUICE_STATE):
 * they have used what this rank will not complete, and drop the step's gradients, too. Where a step has less
 * or more micro-batches, what the stated ones do not have is summed at the next use. Where all gradients of a
 * rank were dropped, its micro-batches of the step begin anew. An engine that trains alone takes both calls,
 * and does nothing. SLUICE_STATE: outside of a step; where micro-batches were not stated.
 *
 * With options.reproducible not 0, of an engine that may also train alone, gradients are added pairwise over
 * the micro-batches of all ranks, neighbours first, and a gradient is the mean over all micro-batches of the
 * step, so that its bits do not depend on how many ranks there are. Rank r has the r-th of as many
 * consecutive ones for each. Each rank ends all of its own before gradients are used, and adds one gradient
 * of a parameter at most in each; sums begin at the first use. The engine keeps up to log2 of a rank's
 * micro-batches of gradients, which its plan has. SLUICE_STATE, with nothing changed, also: where all have
 * ended; from sluice_engine_add_gradient() for a second gradient in a micro-batch, for one that comes after
 * them, and for one that is added to a gradient that was used or kept; and from functions that use gradients,
 * on all ranks, while a rank has not ended all. options.update_in_backward is refused with it. That ranks
 * compute alike (CPU, threads, libraries) is for the caller to see to.
 *
 * With options.update_in_backward on several ranks options.micro_batches is their number: a step has one
 * micro-batch of each. A unit's gradients are summed over the ranks when no rank holds it any more, beside
 * what is computed, and their mean is applied. sluice_engine_release() waits for ranks that have not come as
 * far: until all have gradients of that unit, or, where ranks have those of other units (experts), until each
 * has two units that another one does not have. sluice_engine_end_micro_batch(), with no unit held, brings
 * zeros for what this rank does not have, and waits for all; sluice_engine_step() does it where the client
 * has not. SLUICE_STATE: from sluice_engine_add_gradient() for a gradient that comes after the sum in which
 * it should have been; from functions that read, measure or multiply gradients. No gradient comes too late
 * where each rank has read its units (SLUICE_READ) in the step before, in the reverse of the order in which
 * their gradients come, and these orders of ranks contradict each other nowhere. What is summed cannot be
 * undone: where a mean is not finite (SLUICE_NOT_FINITE), and where a rank abandons a step in which it has
 * summed anything, the engines of all ranks have failed, with an error that names the cause. */
SLUICE_API sluice_status sluice_engine_end_gradients(sluice_engine* engine, uint32_t unit);
SLUICE_API sluice_status sluice_engine_end_micro_batch(sluice_engine* engine);

/* ---- questions ---- */

SLUICE_API sluice_status sluice_ranks_rank(const sluice_ranks* ranks, uint32_t* rank);
SLUICE_API sluice_status sluice_ranks_size(const sluice_ranks* ranks, uint32_t* size);
/* `text` gets which rank failed first, and why, given to the caller; NULL where none has failed. */
SLUICE_API sluice_status sluice_ranks_failure(const sluice_ranks* ranks, char** text);
typedef struct sluice_traffic {
  size_t size;
  uint64_t sent, received;                 /* bytes of gradients, parameters, state, and broadcasts */
  uint64_t sent_besides, received_besides; /* all other bytes */
  uint64_t received_from_hosts;            /* those of `received` that ranks of other hosts sent */
} sluice_traffic;
/* Counts over its life. */
SLUICE_API sluice_status sluice_ranks_traffic(const sluice_ranks* ranks, sluice_traffic* traffic);

/* ---- what callers tell each other ---- */

/* These are collective. `name` says in texts what a call is for; calls of the same name are made in the same
 * order on all ranks, and a caller uses few names. */

#define SLUICE_MOST_EXCHANGED 65536u
/* Each rank gives `bytes` bytes, at most SLUICE_MOST_EXCHANGED. `all` gets what each has given, one after
 * another in the order of ranks, given to the caller, who frees it with sluice_text_destroy(); sizes[ranks]
 * gets how many bytes each has given. */
SLUICE_API sluice_status sluice_ranks_exchange(sluice_ranks* ranks, const char* name, const void* own,
                                               size_t bytes, char** all, size_t* sizes);
/* Afterwards data[bytes] is what rank 0 has there. Of any size, which is the same on all ranks. */
SLUICE_API sluice_status sluice_ranks_broadcast(sluice_ranks* ranks, const char* name, void* data,
                                                uint64_t bytes);
SLUICE_API sluice_status sluice_ranks_barrier(sluice_ranks* ranks, const char* name);
/* Not collective: ends the work of all ranks, whose functions name this rank and `text`. */
SLUICE_API sluice_status sluice_ranks_fail(sluice_ranks* ranks, const char* text);

#ifdef __cplusplus
}
#endif
#endif
