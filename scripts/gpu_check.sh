#!/usr/bin/env bash
# Looks at a machine's GPU in at most 8 minutes: see scripts/gpu_check.py, whose options it takes. It runs in a checkout that was
# built, and in what scripts/bundle.sh has packed.
set -euo pipefail
python=$(dirname "$0")/../.venv/bin/python
[[ -x $python ]] || python=python3
exec "$python" "$(dirname "$0")/gpu_check.py" "$@"
