/* Functions of Sluice's C ABI for files: they describe files without an engine, and add files of the caller's
 * own to a checkpoint, for parts of a model that are no parameters, such as buffers. sluice.h includes this
 * header. */
#ifndef SLUICE_FILES_H
#define SLUICE_FILES_H
#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the caller the tensors of a safetensors file, in file order, or of a model's files in a folder, as a
 * JSON list of {"name", "file" (its name), "dtype" (the file's word), "shape", "begin" (the first byte in the
 * file)}. Of a folder count those of model.safetensors; where there is none, those that
 * model.safetensors.index.json names; where there is neither, those of all files *.safetensors.
 * SLUICE_CORRUPT names the violation of docs/formats/safetensors.md, or what is wrong with the index;
 * SLUICE_INVALID_ARGUMENT where the path is not that of a file, or where two files that count have a tensor
 * of one name. */
SLUICE_API sluice_status sluice_safetensors_tensors(const char* path, char** json);

/* Gives the caller the complete checkpoints of a folder, as JSON: {"steps" (ascending), "best" (null where
 * none records a validation loss, else {"step", "validation_loss"})}. docs/formats/checkpoint.md defines
 * which folders count. */
SLUICE_API sluice_status sluice_checkpoints(const char* folder, char** json);

typedef struct sluice_piece {
  const void* data;
  uint64_t bytes;
} sluice_piece;

typedef struct sluice_file {
  const char* name;           /* a plain file name, different from the engine's own files in a checkpoint */
  const sluice_piece* pieces; /* its bytes, one piece after another */
  size_t piece_count;
} sluice_file;

/* As sluice_engine_save(), with these files in the checkpoint, which is complete with them or absent. With
 * several ranks, rank 0's files are saved. */
SLUICE_API sluice_status sluice_engine_save_with_files(sluice_engine* engine, const char* out, uint64_t keep,
                                                       const sluice_file* files, size_t file_count,
                                                       char** path);
/* `folder` gets the checkpoint that sluice_engine_load() would load from `path`, given to the caller. One of
 * another model or optimizer is refused as there. */
SLUICE_API sluice_status sluice_engine_find_checkpoint(sluice_engine* engine, const char* path,
                                                       char** folder);
/* Verifies every byte of such a file in the checkpoint at `path`, which is as for sluice_engine_load().
 * `file` gets its path, given to the caller; NULL where the checkpoint has no file of that name. */
SLUICE_API sluice_status sluice_engine_checkpoint_file(sluice_engine* engine, const char* path,
                                                       const char* name, char** file);

#ifdef __cplusplus
}
#endif
#endif
