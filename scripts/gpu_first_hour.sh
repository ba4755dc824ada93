#!/usr/bin/env bash
# What to run on a GPU, in calls of under ten minutes each, with what says most first. Calls 1 to 3 ran on an H200. Who has
# a card for a quarter of an hour runs call 7, of which nothing was timed yet, and then the first half of call 8.
#     scripts/gpu_first_hour.sh 1    beside nano-vLLM, and with flash-attn: NANO_VLLM_PYTHON is an interpreter that has both
#                                    (with pytest, too, it runs the tests of flash-attn)
#     scripts/gpu_first_hour.sh 2    beside vLLM: VLLM_PYTHON is an interpreter that has it
#     scripts/gpu_first_hour.sh 3    are the kernels right; the int8 cache; an item of attention; products by shape
#     scripts/gpu_first_hour.sh 4    does all else work
#     scripts/gpu_first_hour.sh 5    where does the time go
#     scripts/gpu_first_hour.sh 6    which configuration is fastest
#     scripts/gpu_first_hour.sh 7    weights in one byte and inputs, too: products, steps and whole runs, beside bfloat16
#     scripts/gpu_first_hour.sh 8    products of few rows: our own kernel beside cuBLAS
#     scripts/gpu_first_hour.sh 9    products by each form of quantised weights; int8
#     scripts/gpu_first_hour.sh 10   more of mixtures
#     scripts/gpu_first_hour.sh pack nothing but the packing of compiled kernels
# A call first says how long it takes at most. It writes one log, call-N.log, to $OUT (default: gpu-first-hour);
# benchmarks/results wants the figures in it. All compiled kernels are packed into one file beside the logs,
# triton-cache.tgz. A machine may keep nothing from call to call, and bring back few files. Then give that file to the
# next call: scripts/gpu_first_hour.sh 2 triton-cache.tgz
# What says most comes first, and the limits of a call's steps add up to its time: so each step has its time.
set -uo pipefail
archive=${2:+$(realpath -m "$2")}
cd "$(dirname "$0")/.."
out=${OUT:-gpu-first-hour}
mkdir -p "$out"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/.triton-cache} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
log=$out/call-${1:-}.log
# A test that waits for the device answers no signal, so a thread ends it, with a traceback.
tests=("$python" -m pytest -q -m gpu -rfE --tb=short --timeout 90 --timeout-method thread)
deadline=$((SECONDS + 570))
failed=()

pack() {  # A loaded kernel needs none of the files left out. The final name is given only to a complete file.
  [ -d "$TRITON_CACHE_DIR" ] || return 0
  tar czf "$out/.part" --exclude='*.ttir' --exclude='*.ttgir' --exclude='*.llir' --exclude='*.ptx' \
    --exclude='*.source' --exclude='tmp.pid_*' -C "$TRITON_CACHE_DIR" . && mv "$out/.part" "$out/triton-cache.tgz"
}

unpack() {  # Triton lists a kernel's files by full path, and wants all of them: each list is made anew, of what is here.
  mkdir -p "$TRITON_CACHE_DIR" && tar xzf "$1" -C "$TRITON_CACHE_DIR" && "$python" - << 'END'
import json, os
from pathlib import Path

for group in Path(os.environ["TRITON_CACHE_DIR"]).resolve().glob("*/__grp__*.json"):
    files = [group.parent / name for name in json.loads(group.read_text())["child_paths"]]
    group.write_text(json.dumps({"child_paths": {file.name: str(file) for file in files if file.exists()}}))
END
}

# NAME SECONDS COMMAND...: at most so long, and not beyond the call's ten minutes; a failure does not end the call.
# At its end a command is interrupted, as by Ctrl-C: then pytest prints what it has found.
step() {
  local name=$1 limit=$2 left=$((deadline - SECONDS)) start=$SECONDS
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  printf '\n=== %s: %s\n' "$name" "$*" | tee -a "$log"
  [ "$limit" -gt 5 ] && timeout -s INT -k 15 "$limit" "$@" > >(tee -a "$log") 2>&1 || failed+=("$name")
  printf '=== %s took %d s\n' "$name" $((SECONDS - start)) | tee -a "$log"
  pack  # after each step: the call may be cut off
}

# What a rival said that failed, or was too slow, is in a file that a machine need not keep.
keep_rival_logs() {
  local file
  for file in "${XDG_CACHE_HOME:-$HOME/.cache}"/nanovllm/bench/*.log; do
    [ ! -f "$file" ] || { printf '\n=== the end of %s\n' "$file"; tail -c 20000 "$file"; } >> "$log"
  done
}

if [ -n "$archive" ]; then
  unpack "$archive" || { echo "gpu_first_hour.sh: cannot unpack $archive" >&2; exit 2; }
fi

limits=$(sed -n "/^  ${1:-none})\$/,/;;/s/^ *step [^ ]* \([0-9]*\) .*/\1/p" "$0" | paste -sd+)
if [ -n "$limits" ]; then
  printf 'call %s takes %d s at most, and writes %s and %s\n' "$1" $((limits)) "$log" "$out/triton-cache.tgz"
fi

case ${1:-} in
  1)
    rival=${NANO_VLLM_PYTHON:?an interpreter that has nano-vLLM, as scripts/rival_env.sh nano-vllm makes one}
    step nano_vllm 200 "$python" bench.py --compare nano-vllm --nano-vllm-python "$rival" --repeat 2 --run-seconds 110
    keep_rival_logs
    step bench_flash_attn 35 "$rival" bench.py --attention-backend flash_attn
    step flash_attn 45 "$rival" "${tests[@]:1}" -n 12 tests/gpu/test_gpu_kernels.py -k flash_attn
    ;;
  2)
    rival=${VLLM_PYTHON:?an interpreter that has vLLM, as scripts/rival_env.sh vllm makes one}
    step vllm 320 "$python" bench.py --compare vllm --vllm-python "$rival" --repeat 2 --run-seconds 190
    keep_rival_logs
    ;;
  3)
    step kernels 65 "${tests[@]}" -n 12 tests/gpu/test_gpu_kernels.py
    step bench_int8_kv 35 "$python" bench.py --kv-cache-dtype int8
    step items 25 "$python" benchmarks/bench_kernels.py --backends triton --batches 256 --contexts 256 1024 4096
    step products 25 "$python" scripts/gpu_profile.py --eager
    ;;
  4)
    step versions 25 "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
    # Triton compiles its launchers with them.
    step compiler 10 "$python" -c 'import os, shutil, sysconfig; print(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or exit("no C compiler is found"), open(sysconfig.get_path("include") + "/Python.h").name)'
    step memory 50 "${tests[@]}" tests/gpu/test_gpu_features.py -k test_default_memory
    step graphs 50 "${tests[@]}" -x tests/gpu/test_gpu_engine.py -k "graph_equals or waits_for"
    step bench_0.6b 65 "$python" bench.py
    # Their engines say how large their caches are, so several fit the device. Others count free memory, and run alone.
    step features 100 "${tests[@]}" -n 4 tests/gpu/test_gpu_features.py -k "not default_memory and not stages"
    step engine 115 "${tests[@]}" tests/gpu/test_gpu_engine.py -k "not graph_equals and not waits_for"
    step stages 65 "${tests[@]}" tests/gpu/test_gpu_features.py -k stages
    ;;
  5)
    step bench_fp8_kv 60 "$python" bench.py --kv-cache-dtype fp8
    step steps 60 "$python" scripts/gpu_steps.py
    step bench_8b 90 "$python" bench.py --model qwen3-8b
    step small_steps 50 "$python" bench.py --max-num-batched-tokens 4096
    step profile 50 "$python" scripts/gpu_profile.py
    step no_pdl 40 "$python" scripts/gpu_profile.py --no-pdl
    step bench_kernels 100 "$python" benchmarks/bench_kernels.py --backends triton --batches 1 64 256 --contexts 1024 4096
    # torch allocates more than a tensor needs, so this finds only what lies far beyond one.
    step memcheck 70 compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes all \
      "${tests[@]}" tests/gpu/test_gpu_kernels.py -k "captured_decode or (routing or products) and bfloat16"
    ;;
  6)
    step codes 130 "$python" scripts/gpu_sweep.py --only codes
    step experts 60 "$python" scripts/gpu_sweep.py --only experts
    step sweep 380 "$python" scripts/gpu_sweep.py --only splits filters
    ;;
  7)
    step rounded 40 "${tests[@]}" -n 12 tests/gpu/test_gpu_kernels.py -k rounded
    step quantised 50 "${tests[@]}" -n 4 tests/gpu/test_gpu_features.py -k "quantised_weights or new_weights"
    step products 90 "$python" scripts/gpu_products.py --forms int8 w8a8
    step bench_8b 80 "$python" bench.py --model qwen3-8b --kv-cache-dtype int8
    step bench_8b_w8a8 70 "$python" bench.py --model qwen3-8b --quantization w8a8 --kv-cache-dtype int8
    step moe_w8a8 90 "$python" bench.py --model qwen3-30b-a3b --quantization w8a8
    step steps_8b 40 "$python" scripts/gpu_steps.py --model qwen3-8b
    step steps_8b_w8a8 40 "$python" scripts/gpu_steps.py --model qwen3-8b --quantization w8a8
    step tiles 60 "$python" scripts/gpu_sweep.py --only rounded
    ;;
  8)
    step few_rows_tests 60 "${tests[@]}" tests/gpu/test_gpu_kernels.py -k few_rows
    step few_rows 90 "$python" benchmarks/bench_kernels.py --backends triton --only-products
    step torch_steps 60 "$python" scripts/gpu_steps.py --few-rows-bytes 0
    step own_steps 60 "$python" scripts/gpu_steps.py --few-rows-bytes 1000000000
    step torch_steps_8b 80 "$python" scripts/gpu_steps.py --model qwen3-8b --few-rows-bytes 0
    step own_steps_8b 80 "$python" scripts/gpu_steps.py --model qwen3-8b --few-rows-bytes 1000000000
    step cuts 140 "$python" scripts/gpu_sweep.py --only cuts
    ;;
  9)
    step products 130 "$python" scripts/gpu_products.py
    step steps_int8 45 "$python" scripts/gpu_steps.py --model qwen3-8b --quantization int8
    step bench_8b_int8 90 "$python" bench.py --model qwen3-8b --quantization int8
    ;;
  10)
    step items_64 30 "$python" benchmarks/bench_kernels.py --backends triton --batches 64 --contexts 4096
    step moe_int8_kv 100 "$python" bench.py --model qwen3-30b-a3b --kv-cache-dtype int8
    step moe_memory 100 "$python" bench.py --model qwen3-30b-a3b --gpu-memory-utilization 0.95
    step moe_int8 90 "$python" bench.py --model qwen3-30b-a3b --quantization int8
    ;;
  pack)
    pack
    ;;
  *)
    sed -n '2,22s/^# //p' "$0"
    exit 2
    ;;
esac
printf '\n%s\n' "${failed[*]:+failed: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]
