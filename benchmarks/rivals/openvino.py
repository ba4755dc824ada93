"""Measures OpenVINO GenAI's continuous batching once. An interpreter from scripts/rival_env.sh runs this file.

Without a mode, OpenVINO computes and caches in the type of the comparison. In the mode "defaults" it decides itself.
Either way it stores the weights in the checkpoint's type. On a processor without bfloat16 it computes in float32 and
refuses a cache in bfloat16; there the weights stay in bfloat16, and keys and values are in float16.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.rivals.worker import Engine, computes_in_bfloat16, main

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
CACHE_GB = 4
"""The size of the KV cache, the same as for vLLM."""


def export(folder: Path, exports: Path) -> Path:
    """Write the checkpoint as an OpenVINO model, unless it exists. Return its folder."""
    newest = max(path.stat().st_mtime_ns for path in folder.iterdir())
    mark = hashlib.sha256(f"{folder} {newest}".encode()).hexdigest()[:12]
    target = exports / f"{folder.name}-{mark}-openvino"
    if target.is_dir():
        return target
    from optimum.exporters.openvino import main_export

    partial = target.with_suffix(f".{os.getpid()}")
    main_export(str(folder), partial, task="text-generation-with-past", convert_tokenizer=False)
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
    path = export(Path(spec["model"]), Path(spec["exports"]))
    stored = computed = cached = SHORT[spec["dtype"]]
    if stored == "bf16" and not computes_in_bfloat16():
        computed = "f32"
        cached = "f16"
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": spec["threads"]}
    if mode != "defaults":
        properties |= {"INFERENCE_PRECISION_HINT": computed, "KV_CACHE_PRECISION": cached}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = spec["max_num_seqs"]
    if spec["max_num_batched_tokens"]:
        scheduler.max_num_batched_tokens = spec["max_num_batched_tokens"]
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)

    def run(workload: dict[str, Any]) -> int:
        prompts = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in workload["prompts"]]
        results = pipeline.generate(prompts, [sampling(spec["temperature"], n) for n in workload["output_lens"]])
        return sum(len(result.m_generation_ids[0]) for result in results)

    kept = "its defaults" if mode == "defaults" else f"computed in {computed}, KV {cached}"
    return Engine(run, f"weights {stored}, {kept}")


def sampling(temperature: float, num_tokens: int) -> openvino_genai.GenerationConfig:
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    return openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, **how)


if __name__ == "__main__":
    main(load, {"openvino": openvino_genai.__version__.split("-")[0]})
