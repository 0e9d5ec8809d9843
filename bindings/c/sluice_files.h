/* Functions of Sluice's C ABI that tell what files hold, without an engine. */
#ifndef SLUICE_FILES_H
#define SLUICE_FILES_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the caller the tensors of a safetensors file, in the order in which they lie, as a JSON list of
 * {"name", "dtype" (the file's word), "shape", "begin" (the first byte in the file)}. SLUICE_CORRUPT says
 * what is against docs/formats/safetensors.md, and SLUICE_INVALID_ARGUMENT that the path is not that of a
 * file. */
SLUICE_API sluice_status sluice_safetensors_tensors(const char* path, char** json);

/* Gives the caller the whole checkpoints of a folder, as JSON: {"steps" (the least first), "best" (null where
 * none records a validation loss, else {"step", "validation_loss"})}. docs/formats/checkpoint.md says which
 * folders count. */
SLUICE_API sluice_status sluice_checkpoints(const char* folder, char** json);

#ifdef __cplusplus
}
#endif
#endif
