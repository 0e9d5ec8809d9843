#!/usr/bin/env bash
# Makes the file of GPU kernels, and needs only CUDA's compiler: $NVCC, else the first nvcc of CUDA 13 or later in the Python packages
# in .venv (scripts/setup.sh --cuda), in the PATH, and in $CUDA_HOME.
#   scripts/kernels.sh FILE       makes it (libsluice_kernels.fatbin, beside libsluice_cuda.so)
#   scripts/kernels.sh --id FILE  writes the header that tells the plug-in which sources the kernels are of
#   scripts/kernels.sh --list     lists all files that this needs
#   scripts/kernels.sh --nvcc     names the compiler that it takes, and fails where there is none
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
# Prints which compiler is taken, or what the installed ones lack.
find_nvcc() {
  local places=("$root"/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
  local file major old=""
  [[ -z ${NVCC:-} ]] || places=("$NVCC")
  for file in "${places[@]}"; do
    [[ -x $file ]] || continue
    major=$("$file" --version 2>&1 | sed -n 's/.*release \([0-9][0-9]*\).*/\1/p') || true
    if ((${major:-0} >= 13)); then
      echo "$file"
      return
    fi
    old+="; $file is of ${major:+CUDA }${major:-an unknown version}"
  done
  echo "kernels: there is no nvcc of CUDA 13 or later, which scripts/setup.sh --cuda installs$old" >&2
  return 1
}
if [[ "${1:-}" == --nvcc ]]; then
  find_nvcc
  exit
fi
id=$(cat "${sources[@]}" "${headers[@]}" | sha256sum | cut -d' ' -f1)
if [[ "${1:-}" == --id ]]; then
  printf '#pragma once\ninline constexpr const char* kKernelsId = "%s";\n' "$id" > "$2"
  exit
fi
(($# == 1)) || { echo "kernels: name the file to make, as in build/lib/libsluice_kernels.fatbin" >&2; exit 2; }
nvcc=$(find_nvcc)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# One compilation of all sources makes one fat binary.
printf '#include "%s"\n' "${sources[@]}" > "$work/all.cu"
# A contracted sum, a warning or a register that is spilled to memory ends the script: the first would change bits, the last would
# take time. PTX for compute_90 would differ only in its name, and would double the compiler's time.
"$nvcc" -std=c++20 --expt-relaxed-constexpr --fmad=false -Werror all-warnings -Xptxas --warn-on-spills,--warning-as-error -I "$root" \
  -gencode 'arch=compute_80,code=[sm_80,sm_90]' -gencode 'arch=compute_100,code=[sm_100,compute_100]' \
  --compress-mode=size --threads 2 --fatbin -o "$work/kernels" "$work/all.cu"
{ printf %s "$id"; cat "$work/kernels"; } > "$work/file"
mv "$work/file" "$1"
