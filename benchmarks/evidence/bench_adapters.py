"""Measures what a change of adapters costs, between two groups of requests.

    python benchmarks/evidence/bench_adapters.py [--shape qwen3-0.6b] [--changes 5]

A checkpoint of the shape in bfloat16, with random weights, and two adapters of rank 16 are written into a folder that
is removed at the end. Seconds are those of the line of the log: from the end of a group to the beginning of the next.
The checkpoint is in the system's cache by then. "In" is from the model as it was loaded to the adapter, "out" the way
back. The last line is JSON: the seconds of each change.
"""

import argparse
import json
import logging
import re
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.random_checkpoint import write_random_checkpoint
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.shapes import preset_config

RANK = 16
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {"all linear layers": LINEAR, "q_proj and v_proj": ("q_proj", "v_proj")}


def write_adapter(checkpoint: Path, folder: Path, modules: tuple[str, ...]) -> None:
    """Write a random adapter, as PEFT does, for the modules of each layer."""
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if name.endswith(tuple(f"{module}.weight" for module in modules)):
                    rows, columns = file.get_slice(name).get_shape()
                    start = f"base_model.model.{name.removesuffix('.weight')}"
                    tensors[f"{start}.lora_A.weight"] = torch.randn(RANK, columns) / 100
                    tensors[f"{start}.lora_B.weight"] = torch.randn(rows, RANK) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Changes(logging.Handler):
    """Keeps the seconds and the megabytes of each change that the engine logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.search(r"in the weights: ([\d.]+) s, ([\d.]+) MB", record.getMessage()):
            self.found.append((float(match[1]), float(match[2])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--changes", type=int, default=5)
    options = parser.parse_args()
    changes = Changes()
    logger = logging.getLogger("nanovllm.features.adapters.groups")
    logger.addHandler(changes)
    logger.setLevel(logging.INFO)
    params = SamplingParams(temperature=0, max_tokens=1)
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as parent:
        checkpoint = Path(parent) / "model"
        write_random_checkpoint(preset_config(options.shape), "bfloat16", checkpoint)
        for name, modules in ADAPTERS.items():
            write_adapter(checkpoint, Path(parent) / name, modules)
        for quantization in (None, "int8"):
            config = {"quantization": quantization, "dtype": "bfloat16", "max_model_len": 64, "num_kvcache_blocks": 1}
            with LLM(checkpoint, device="cpu", **config) as llm:
                for number, name in enumerate(ADAPTERS, 1):
                    del changes.found[:]
                    for lora_request in [LoRARequest(name, number, str(Path(parent) / name)), None] * options.changes:
                        llm.generate([[1, 2, 3]], params, use_tqdm=False, lora_request=lora_request)
                    ways = {"in": changes.found[::2], "out": changes.found[1::2]}
                    case = f"{name}, {quantization or 'bfloat16'}"
                    seconds[case] = {way: [second for second, _ in found] for way, found in ways.items()}
                    texts = (
                        f"{way} {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f})"
                        for way, each in seconds[case].items()
                    )
                    print(f"{case}: {', '.join(texts)}; {changes.found[0][1]:.1f} MB read", flush=True)
    print(json.dumps({"shape": options.shape, "seconds": seconds}))


if __name__ == "__main__":
    main()
