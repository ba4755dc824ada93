"""Measures OpenVINO GenAI's continuous batching once. An interpreter from scripts/rival_env.sh runs this file.

Without a mode, OpenVINO computes and caches in the type of the comparison. In the mode "defaults" it decides itself.
Either way it stores the weights in the checkpoint's type, or as it reads a GGUF file. In the modes "int8" and "int4"
nncf has quantised a checkpoint's weights, and activations keep their type. With "int8-defaults" and "int4-defaults"
OpenVINO also quantises activations.
On a processor without bfloat16 it computes in float32 and refuses a cache in bfloat16. There the weights stay in
bfloat16, and keys and values are in float16.
"""

import hashlib
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.rivals.worker import CannotRun, DepthTimes, Engine, computes_in_bfloat16, main

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
CACHE_GB = 4
"""The size of the KV cache, the same as for vLLM. bench_depth.py names a larger one for large batches."""


def export(folder: Path, exports: Path, bits: int) -> Path:
    """Write the checkpoint as an OpenVINO model, unless it exists. Return its folder.

    Args:
        bits: 8 or 4 to let nncf quantise the weights by its defaults for that many bits; 16 to leave them.
    """
    newest = max(path.stat().st_mtime_ns for path in folder.iterdir())
    mark = hashlib.sha256(f"{folder} {newest}".encode()).hexdigest()[:12]
    target = exports / f"{folder.name}-{mark}-openvino{'' if bits == 16 else f'-int{bits}'}"
    if target.is_dir():
        return target
    partial = target.with_suffix(f".{os.getpid()}")
    if bits == 16:
        from optimum.exporters.openvino import main_export

        main_export(str(folder), partial, task="text-generation-with-past", convert_tokenizer=False)
    else:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        config = OVWeightQuantizationConfig(bits=bits)
        OVModelForCausalLM.from_pretrained(
            str(folder), export=True, compile=False, quantization_config=config
        ).save_pretrained(partial)
    write_tokenizer(partial)
    partial.rename(target)
    return target


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes. GenAI needs one, though only token ids go in and come out."""
    from openvino_tokenizers import convert_tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The conversion fails without at least one merge and one special token.
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aa"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    both = convert_tokenizer(fast, with_detokenizer=True)
    for model, name in zip(both, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml")


def load(spec: dict[str, Any], mode: str) -> Engine:
    bits = next((bits for bits in (8, 4) if mode.startswith(f"int{bits}")), 16)
    decides = mode.endswith("defaults")
    path = Path(spec["model"])
    is_file = path.is_file()
    if is_file and bits < 16:
        raise CannotRun(f"{path.name} has the types that it has: nncf quantises checkpoints")
    if not is_file:
        path = export(path, Path(spec["exports"]), bits)
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": spec["threads"]}
    stored = computed = cached = SHORT[spec["dtype"]]
    if stored == "bf16" and not computes_in_bfloat16():
        computed = "f32"
        cached = "f16"
        # Its default here, too. But it does not read ONEDNN_MAX_CPU_ISA, which its kernels obey.
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    if not decides:
        properties |= {"INFERENCE_PRECISION_HINT": computed, "KV_CACHE_PRECISION": cached}
        if bits < 16:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # activations keep their type
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = spec.get("cache_gb", CACHE_GB)
    scheduler.max_num_seqs = spec["max_num_seqs"]
    if spec["max_num_batched_tokens"]:
        scheduler.max_num_batched_tokens = spec["max_num_batched_tokens"]
    try:
        pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    except (RuntimeError, IndexError) as error:
        if not is_file:
            raise
        raise CannotRun(f"OpenVINO does not read {path.name}: {' '.join(str(error).split())}") from error

    def run(workload: dict[str, Any]) -> int:
        prompts = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in workload["prompts"]]
        results = pipeline.generate(prompts, [sampling(spec["temperature"], n) for n in workload["output_lens"]])
        return sum(len(result.m_generation_ids[0]) for result in results)

    def measure_depth(counts: list[int]) -> list[DepthTimes]:
        chunk = scheduler.max_num_batched_tokens
        return [measure(pipeline, spec["workload"]["prompts"][:n], spec["depth"]["num_decodes"], chunk) for n in counts]

    how = "its defaults" if decides else f"computed in {computed}, KV {cached}"
    if bits == 16:
        return Engine(run, f"weights {'from the file' if is_file else stored}, {how}", measure_depth)
    activations = "activations 8 bits" if decides else "activations not quantised"
    num_bytes = (path / "openvino_model.bin").stat().st_size / count_parameters(Path(spec["model"]))
    return Engine(run, f"weights int{bits}, {num_bytes:.2f} bytes each, {activations}, {how}")


def measure(pipeline: Any, prompts: list[list[int]], num_decodes: int, chunk: int) -> DepthTimes:
    """Run prompts of one length step by step.

    While a later prompt is computed in chunks, the earlier sequences already decode. So that they still run when the
    last one decodes, each earlier one gets as many more tokens as its successors' prompts have chunks.
    """
    num_chunks = -(-len(prompts[0]) // (chunk - len(prompts)))
    handles = []
    for i, prompt in enumerate(prompts):
        output_len = num_decodes + (len(prompts) - 1 - i) * num_chunks
        tokens = openvino.Tensor(np.array([prompt], np.int64))
        handles.append(pipeline.add_request(i, tokens, sampling(0, output_len)))
    begin = time.perf_counter()
    prompt_seconds = None
    steps = []
    has_token = [False] * len(handles)
    while pipeline.has_non_finished_requests():
        since = time.perf_counter()
        pipeline.step()
        now = time.perf_counter()
        is_read = [handle.can_read() and bool(handle.read()) for handle in handles]
        if prompt_seconds is not None and all(is_read):
            steps.append(now - since)
        has_token = [before or new for before, new in zip(has_token, is_read, strict=True)]
        if prompt_seconds is None and all(has_token):
            prompt_seconds = now - begin
    return {"prompt_seconds": prompt_seconds, "step_seconds": steps}


def count_parameters(folder: Path) -> int:
    """Return the number of weights in a checkpoint, each tied matrix counted once."""
    from safetensors import safe_open

    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            names = file.keys()
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return count


def sampling(temperature: float, num_tokens: int) -> openvino_genai.GenerationConfig:
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    return openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, **how)


if __name__ == "__main__":
    main(load, {"openvino": openvino_genai.__version__.split("-")[0]})
