#!/usr/bin/env bash
# Makes a virtual environment with OpenVINO GenAI, and what exports a model for it, to measure beside; about 2 GB.
#   usage: scripts/openvino_env.sh DIR [VERSION]      then: bench.py --compare openvino --openvino-python DIR/bin/python
# The export pins other versions of transformers than this project. Its torchvision is left out: a text model never imports
# it, and with it torch's build for CPUs may become the one for CUDA, of gigabytes. DIR may be there already.
set -euo pipefail
usage="usage: openvino_env.sh DIR [VERSION], where VERSION is openvino-genai's (2026.4.1.0)"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
target=$1
version=${2:-2026.4.1.0}
torch=${TORCH_VERSION:-2.13.0}

[ -x "$target/bin/python" ] || python3 -m venv "$target"
python=$target/bin/python
"$python" -m pip install --quiet "torch==$torch"
"$python" -m pip install --quiet "openvino-genai==$version"
"$python" -m pip install --quiet --no-deps "optimum-intel==2.2.0" "optimum==2.3.0"
"$python" - <<'PY' >"$target/export-requirements.txt"
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "optimum"}
for line in [*requires("optimum-intel"), *requires("optimum")]:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(line)
PY
"$python" -m pip install --quiet --requirement "$target/export-requirements.txt"
"$python" -c 'import openvino_genai, optimum.intel, torch; print("openvino-genai", openvino_genai.__version__, "torch", torch.__version__)'
