/* Functions of Sluice's C ABI that copy values or state from and to whole arrays in memory. sluice.h includes
 * this header.
 *
 * A caller passes them to sluice_engine_set_values(), sluice_engine_get_values(), sluice_engine_get_state()
 * and sluice_engine_set_state(). They take no lock. (A function that waits for a lock may deadlock: another
 * thread, for example one of Python with the GIL, may hold that lock while it accesses an absent parameter
 * and, with options.serve_touches, waits for its turn on the engine.)
 */
#ifndef SLUICE_ARRAYS_H
#define SLUICE_ARRAYS_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_array {
  void* data; /* all elements in the unit; NULL: skipped when written, zeros when read */
  sluice_dtype dtype;
} sluice_array;
/* The context of these functions. The arrays belong to the caller, and must not lie in the memory of the
 * engine's parameters. */
typedef struct sluice_arrays {
  size_t size;
  uint32_t first_parameter, parameters; /* the parameters of the unit; others are skipped */
  uint32_t arrays;                      /* how many each parameter has, in the engine's order; 1 for values */
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

#ifdef __cplusplus
}
#endif
#endif
