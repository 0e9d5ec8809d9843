#!/usr/bin/env bash
# Does all the set-up and runs all the tests: C++ (ctest), then Python (pytest, with PyTorch as the reference).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh
scripts/setup.sh --python
ctest --test-dir build --output-on-failure --timeout 600 -j "$(nproc)"
.venv/bin/python -m pytest -q tests/python
