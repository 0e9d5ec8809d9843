#!/usr/bin/env bash
# Makes the file of GPU kernels with CUDA's compiler alone, which is all that it needs: $NVCC, else nvcc of the PATH or of
# $CUDA_HOME, else that of the Python packages in .venv (scripts/setup.sh --cuda). It must be of CUDA 13 or later.
#   scripts/kernels.sh FILE       makes it (libsluice_kernels.fatbin, beside libsluice_cuda.so)
#   scripts/kernels.sh --id FILE  writes the header that tells the plug-in which sources the kernels are of
#   scripts/kernels.sh --list     lists all files that this needs
# The file begins with the digest of the sources, and has code for sm_80, sm_90 and sm_100, and PTX for later ones.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
sources=(kernels/cuda/reduce.cu kernels/cuda/sum.cu optim/cuda/update.cu)
headers=(optim/cuda/update.h optim/arithmetic-inl.h optim/factors.h optim/code_table.h optim/eight_bit.h kernels/cuda/reduce.h kernels/cuda/sum.h kernels/grid.h
  core/dtype.h core/random.h core/cuda/kernel.h core/cuda/packed.h scripts/kernels.sh)
if [[ "${1:-}" == --list ]]; then
  printf '%s\n' "${sources[@]}" "${headers[@]}"
  exit
fi
id=$(cat "${sources[@]}" "${headers[@]}" | sha256sum | cut -d' ' -f1)
if [[ "${1:-}" == --id ]]; then
  printf '#pragma once\ninline constexpr const char* kKernelsId = "%s";\n' "$id" > "$2"
  exit
fi
(($# == 1)) || { echo "kernels: name the file to make, as in build/lib/libsluice_kernels.fatbin" >&2; exit 2; }
nvcc=${NVCC:-$(command -v nvcc || true)}
[[ -n $nvcc || ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] || nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
[[ -n $nvcc ]] || nvcc=$(ls .venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc 2> /dev/null || true)
[[ -n $nvcc ]] || { echo "kernels: there is no nvcc; scripts/setup.sh --cuda installs it" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# One compilation of all sources makes one fat binary.
printf '#include "%s"\n' "${sources[@]}" > "$work/all.cu"
# A sum that is contracted, a warning or a register that is spilled to memory ends it: the first would change bits, the last time.
"$nvcc" -std=c++20 --expt-relaxed-constexpr --fmad=false -Werror all-warnings -Xptxas --warn-on-spills,--warning-as-error -I "$root" \
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode 'arch=compute_100,code=[sm_100,compute_100]' \
  --compress-mode=size --threads 2 --fatbin -o "$work/kernels" "$work/all.cu"
{ printf %s "$id"; cat "$work/kernels"; } > "$work/file"
mv "$work/file" "$1"
