#!/usr/bin/env bash
# Runs a command as on a CPU with narrower vectors: scripts/capped.sh avx2|avx512 COMMAND... avx512 excludes the instructions
# for bf16. It caps Sluice's loops, oneDNN (Sluice's and PyTorch's), PyTorch's loops, and MKL.
set -euo pipefail
case "${1:-}" in
  avx2) isa=AVX2 mkl=AVX2 ;;
  avx512) isa=AVX512_CORE mkl=AVX512 ;;
  *) echo "capped: '${1:-}' is not a cap; use avx2 or avx512, followed by a command" >&2; exit 2 ;;
esac
export SLUICE_MAX_TARGET="$1" ATEN_CPU_CAPABILITY="$1" ONEDNN_MAX_CPU_ISA="$isa" MKL_ENABLE_INSTRUCTIONS="$mkl"
# torch.compile's cache ignores caps, and code for another cap writes past the ends of arrays. So each cap has a cache of
# its own.
export TORCHINDUCTOR_CACHE_DIR="${TMPDIR:-/tmp}/torchinductor-$1-$(id -u)"
shift
(($#)) || { echo "capped: no command is given; give one, as in: scripts/capped.sh avx2 scripts/test.sh" >&2; exit 2; }
exec "$@"
