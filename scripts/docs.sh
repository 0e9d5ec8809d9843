#!/usr/bin/env bash
# Makes the API reference in FOLDER (build/docs): of the Python package out of its docstrings by pdoc, and of the C ABI out of its
# headers by doxygen. scripts/setup.sh --python installs the one, and apt-get install doxygen the other. Usage: scripts/docs.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/docs}
python=${SLUICE_PYTHON:-.venv/bin/python}

command -v doxygen > /dev/null || { echo "docs: there is no doxygen; apt-get install doxygen" >&2; exit 1; }
"$python" -c 'import pdoc' 2> /dev/null || { echo "docs: $python has no pdoc; scripts/setup.sh --python" >&2; exit 1; }
mkdir -p "$out"

# The modules of sluice that begin with _ are private, and pdoc leaves them out.
PYTHONPATH="bindings/python${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pdoc --output-directory "$out/python" sluice sluice.torch

# The headers have plain comments, above what they describe or behind it, which the filter marks as doxygen wants them.
doxygen - << END
PROJECT_NAME = "Sluice, C ABI"
INPUT = bindings/c
FILE_PATTERNS = sluice*.h
INPUT_FILTER = "sed -E '1s|^/\\* |/** @file\\n * |; s|^( *)/\\* |\\1/** |; s|([;,]) +/\\* |\\1 /**< |'"
OUTPUT_DIRECTORY = $out
HTML_OUTPUT = c
GENERATE_LATEX = NO
HAVE_DOT = NO
OPTIMIZE_OUTPUT_FOR_C = YES
EXTRACT_ALL = YES
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = SLUICE_API=
MAX_INITIALIZER_LINES = 0
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_AS_ERROR = YES
END
echo "docs: $out/python/index.html and $out/c/index.html"
