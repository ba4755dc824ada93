#!/usr/bin/env bash
# What to run first on a GPU, in three calls of under ten minutes each:
#     scripts/gpu_first_hour.sh 1    does it work
#     scripts/gpu_first_hour.sh 2    where does the time go
#     scripts/gpu_first_hour.sh 3    which configuration is fastest
# Compiled kernels lie in .triton-cache, which is to be carried from call to call where the machine does not keep it.
# Everything is written to $OUT (default: gpu-first-hour) as well; docs/benchmarks.md wants its figures.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-gpu-first-hour}
mkdir -p "$out"
export TRITON_CACHE_DIR=$PWD/.triton-cache HF_HUB_OFFLINE=1
[ -d "$out/.triton-cache" ] && cp -r "$out/.triton-cache" .
python=${PYTHON:-python3}
deadline=$((SECONDS + 570))
failed=()

step() {  # NAME SECONDS COMMAND...: at most so long, and not beyond the call's ten minutes; a failure does not end it
  local name=$1 limit=$2 left=$((deadline - SECONDS)) start=$SECONDS
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  printf '\n=== %s: %s\n' "$name" "$*"
  [ "$limit" -gt 5 ] && timeout "$limit" "$@" > >(tee "$out/$name.log") 2>&1 || failed+=("$name")
  printf '=== %s took %d s\n' "$name" $((SECONDS - start))
}

case ${1:-} in
  1)
    step versions 60 "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
    step graphs 240 "$python" -m pytest -q -x -m gpu tests/test_gpu_engine.py -k "graph_equals or waits_for"
    step kernels 300 "$python" -m pytest -q -m gpu -n 12 tests/test_gpu_kernels.py
    step engine 240 "$python" -m pytest -q -m gpu tests/test_gpu_engine.py -k "not graph_equals and not waits_for"
    ;;
  2)
    step bench_kernels 240 "$python" benchmarks/bench_kernels.py --backends triton --batches 1 64 256 --contexts 1024 4096
    step profile 90 "$python" scripts/gpu_profile.py
    step no_pdl 60 "$python" scripts/gpu_profile.py --no-pdl
    step bench_0.6b 150 "$python" bench.py
    step bench_8b 200 "$python" bench.py --model qwen3-8b
    ;;
  3)
    step sweep 560 "$python" scripts/gpu_sweep.py
    ;;
  *)
    sed -n '2,7s/^# //p' "$0"
    exit 2
    ;;
esac
cp -r .triton-cache "$out" 2> /dev/null
printf '\n%s\n' "${failed[*]:+failed: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]
