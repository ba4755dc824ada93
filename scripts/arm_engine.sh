#!/usr/bin/env bash
# Runs the whole engine for 64-bit Arm in an emulator, and compares its tokens with those of this processor.
#   usage: scripts/arm_engine.sh DIR [ENGINE...]     DIR may be there already: what it has is not loaded again
# An ENGINE is a JSON object of options; by default one of the CPU kernels alone, and one of two ranks.
# It needs Debian 12 or what has its packages, about 1 GB, this project's Python environment, and
#   apt-get install g++-aarch64-linux-gnu qemu-user
# torch is 2.10.0: of later ones the package registry has only a build for CUDA, which needs gigabytes more. It has no
# torch.cpu.get_capabilities, so it gets one that names no capability. The model is the one in the package, in float32:
# in bfloat16, processors round differently.
set -euo pipefail
usage="usage: arm_engine.sh DIR [ENGINE...], where an ENGINE is a JSON object of options"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v $tool >/dev/null || { echo "arm_engine.sh: there is no $tool (see the top of this file)" >&2; exit 1; }
done
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
project=$(cd "$(dirname "$0")/.." && pwd)

# Debian's Python and C libraries for Arm, unpacked into $folder/root. apt keeps its lists there, too.
load_python() {
    local apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::status=/dev/null
        -o Dir::State::lists="$folder/apt" -o Dir::Cache="$folder/apt/cache" -o APT::Sandbox::User=root)
    mkdir -p "$folder/apt/partial" "$folder/apt/cache/archives/partial" "$folder/debs" "$folder/root"
    "${apt[@]}" update
    (cd "$folder/debs" && "${apt[@]}" download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 \
        libstdc++6 libgcc-s1 libgomp1 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1)
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
}

# The packages that the engine needs, for Arm, in $folder/site.
load_packages() {
    local wheels=(--quiet --no-warn-conflicts --target "$folder/site" --only-binary :all: --python-version 3.11
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64
        --platform manylinux_2_28_aarch64)
    python -m pip install "${wheels[@]}" "transformers>=5,<6" huggingface-hub xxhash safetensors tqdm "numpy<2.4" \
        sympy networkx jinja2 filelock fsspec typing-extensions
    python -m pip install "${wheels[@]}" --no-deps torch==2.10.0
    printf '\n\ndef get_capabilities():\n    return {}\n' >>"$folder/site/torch/cpu/__init__.py"
    # Other ranks are started by sys.executable, which must be the emulator.
    printf 'import os, sys\nsys.executable = os.environ["ARM_PYTHON"]\n' >"$folder/site/sitecustomize.py"
    printf '#!/bin/sh\nexec qemu-aarch64 -L "%s" "%s" "$@"\n' "$folder/root" "$folder/root/usr/bin/python3.11" \
        >"$folder/python"
    chmod +x "$folder/python"
}

[ -x "$folder/root/usr/bin/python3.11" ] || load_python
[ -x "$folder/python" ] || load_packages
cat >"$folder/generate.py" <<'PY'
import json
import platform
import sys

from nanovllm import LLM, SamplingParams

QUESTIONS = ["what is 17 + 25?", "what is the capital of France?", "count from 7 to 21"]

if __name__ == "__main__":
    options = {"dtype": "float32", "attention_backend": "cpu", "max_model_len": 256, "num_kvcache_blocks": 16}
    with LLM("tiny-qwen3", **(options | json.loads(sys.argv[1]))) as llm:
        outputs = llm.generate(QUESTIONS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        outputs += llm.generate(QUESTIONS, SamplingParams(temperature=1.0, seed=7, max_tokens=24), use_tqdm=False)
    print("on", platform.machine(), file=sys.stderr)
    print([output["token_ids"] for output in outputs])
PY
export HF_HUB_OFFLINE=1
[ $# -gt 0 ] || set -- '{}' '{"tensor_parallel_size": 2}'
for options in "$@"; do
    expected=$(PYTHONPATH=$project python "$folder/generate.py" "$options" | tail -n 1)
    SECONDS=0
    found=$(PYTHONPATH=$folder/site:$project ARM_PYTHON=$folder/python CXX=aarch64-linux-gnu-g++ \
        XDG_CACHE_HOME=$folder/cache "$folder/python" "$folder/generate.py" "$options" | tail -n 1) # gloo prints, too
    if [ "$found" != "$expected" ]; then
        printf 'DIFFERENT tokens with %s\n  here:   %s\n  on Arm: %s\n' "$options" "$expected" "$found" >&2
        exit 1
    fi
    echo "the same tokens with $options ($SECONDS s in the emulator)"
done
