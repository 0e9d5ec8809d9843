#!/usr/bin/env bash
# Installs the Debian packages that the build needs. It may be run again, and does nothing where all are installed. Options add packages for
# tests only: --clang installs clang, for the fuzzers, clang-format, and doxygen; --tidy clang-tidy; --python makes .venv with the packages of
# requirements.txt, with which the Python tests compare. --cuda adds CUDA's compiler to .venv (300 MB) where the system lacks CUDA 13 or
# later.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build ccache pkg-config git python3 python3-venv
  liburing-dev libtbb-dev libhwy-dev libdnnl-dev nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev
  libxxhash-dev libopenmpi-dev openmpi-bin libjs-chart.js libgtest-dev libgmock-dev libbenchmark-dev)
if [[ " $* " == *" --clang "* ]]; then packages+=(clang-14 libclang-rt-14-dev clang-format-14 doxygen); fi
if [[ " $* " == *" --tidy "* ]]; then packages+=(clang-tidy-16); fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -q '^installed$' || missing+=("$package")
done
if ((${#missing[@]})); then
  if ! command -v apt-get >/dev/null; then
    echo "setup: this system has no apt-get; install these Debian packages' equivalents by hand: ${missing[*]}" >&2
    exit 1
  fi
  as_root=()
  if (($(id -u) != 0)); then
    command -v sudo >/dev/null || { echo "setup: run as root, or install: ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
  fi
  echo "setup: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -q
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

if [[ " $* " == *" --python "* ]]; then
  if [[ ! -x .venv/bin/python ]]; then python3 -m venv .venv; fi
  if ! cmp -s requirements.txt .venv/installed; then
    .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/installed
  fi
fi

if [[ " $* " == *" --cuda "* ]] && ! scripts/kernels.sh --nvcc > /dev/null 2>&1; then
  if [[ ! -x .venv/bin/python ]]; then python3 -m venv .venv; fi
  .venv/bin/python -m pip install -q --disable-pip-version-check nvidia-cuda-{nvcc,crt,runtime}==13.0.88 nvidia-nvvm==13.0.88
fi
