#!/usr/bin/env bash
# The tests on the oldest torch that is declared, 2.11, with the Triton that it pins: downloads gigabytes of CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(mktemp -d)/venv
trap 'rm -rf "$(dirname "$venv")"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q "torch==2.11.*" -e ".[test]"
PATH=$venv/bin:$PATH "$venv/bin/python" -m pytest -q "$@"
