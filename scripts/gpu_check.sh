#!/usr/bin/env bash
# Checks a machine's GPU in at most 8 minutes: see scripts/gpu_check.py, whose options it takes. It runs in a source tree with a
# build, and in the archive of scripts/bundle.sh.
set -euo pipefail
python=$(dirname "$0")/../.venv/bin/python
[[ -x $python ]] || python=python3
exec "$python" "$(dirname "$0")/gpu_check.py" "$@"
