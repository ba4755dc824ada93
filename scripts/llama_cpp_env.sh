#!/usr/bin/env bash
# Makes a virtual environment with llama.cpp, compiled for this processor, to measure beside.
#   usage: scripts/llama_cpp_env.sh DIR [VERSION]      then: bench.py --compare llama-cpp --llama-cpp-python DIR/bin/python
# The sources are those within llama-cpp-python's release; its wheels, where there are some, are built for older processors.
# A C++ compiler is all that the machine must have; compiling takes about ten minutes of one core. DIR may be there already.
set -euo pipefail
usage="usage: llama_cpp_env.sh DIR [VERSION], where VERSION is llama-cpp-python's (0.3.36)"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
target=$1
version=${2:-0.3.36}
command -v "${CXX:-g++}" >/dev/null || { echo "llama_cpp_env.sh: llama.cpp is compiled, and there is no ${CXX:-g++}" >&2; exit 1; }

[ -x "$target/bin/python" ] || python3 -m venv "$target"
python=$target/bin/python
installed=$("$python" -c 'from importlib.metadata import version; print(version("llama-cpp-python"))' 2>/dev/null || true)
if [ "$installed" != "$version" ]; then
    export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF"
    "$python" -m pip install --quiet --no-binary llama-cpp-python "llama-cpp-python==$version"
fi
"$python" -m pip install --quiet "gguf==0.19.0" # writes models in llama.cpp's format
"$python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
