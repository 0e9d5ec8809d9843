#!/usr/bin/env bash
# Runs a command as on a CPU with narrower vectors: scripts/capped.sh avx2|avx512 COMMAND...
# avx512: without instructions for bf16. Caps Sluice's loops, oneDNN (its own and PyTorch's), PyTorch's loops, and MKL.
set -euo pipefail
case "${1:-}" in
  avx2) isa=AVX2 mkl=AVX2 ;;
  avx512) isa=AVX512_CORE mkl=AVX512 ;;
  *) echo "capped: '${1:-}' is not a cap; use avx2 or avx512, and a command behind it" >&2; exit 2 ;;
esac
export SLUICE_MAX_TARGET="$1" ATEN_CPU_CAPABILITY="$1" ONEDNN_MAX_CPU_ISA="$isa" MKL_ENABLE_INSTRUCTIONS="$mkl"
# torch.compile keeps what it compiled without regard to caps, and code of another cap writes past the ends of its arrays:
# so each cap has a folder of its own.
export TORCHINDUCTOR_CACHE_DIR="${TMPDIR:-/tmp}/torchinductor-$1-$(id -u)"
shift
(($#)) || { echo "capped: say what to run, as in: scripts/capped.sh avx2 scripts/test.sh" >&2; exit 2; }
exec "$@"
