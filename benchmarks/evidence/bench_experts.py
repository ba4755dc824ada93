"""Measures a mixture of experts: decode steps and the expert blocks alone, against the time to read their weights.

python benchmarks/evidence/bench_experts.py [--layers 6] [--batches 1 8 32] [--dtype bfloat16]

The model has a preset's layers, but fewer of them, with random weights. The floor is the time to read a step's bytes at
the rate that was measured just before: the experts that got a token (they are counted), attention, routers, LM head,
keys and values.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measuring import commit
from nanovllm import LLM, SamplingParams
from nanovllm.apps.bench import Recorder
from nanovllm.apps.estimate import fetch_config
from nanovllm.apps.floor import Model, count_expert, measure_machine
from nanovllm.features.shapes import preset_config


def count_touched(model: Any) -> list[int]:
    """Return a list that grows by one entry whenever a layer routes: the number of experts that got a token."""
    touched: list[int] = []

    def count(route: Callable[..., Any], *arguments: Any) -> Any:
        routing = route(*arguments)
        touched.append(int((routing.offsets.diff() > 0).sum()))
        return routing

    for layer in model.layers:
        layer.mlp.operators.route = partial(count, layer.mlp.operators.route)
    return touched


def measure_steps(llm: LLM, model: Model, batch: int, output_len: int, touched: list[int]) -> Any:
    """Return medians over the steps of `batch` decodes: seconds, bytes to read, experts of a layer that got a token."""
    draw = Random(batch)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(64)] for _ in range(batch)]
    recorder = Recorder(torch.device("cpu"))
    llm.observe(recorder)
    touched.clear()
    llm.generate(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output_len), use_tqdm=False)
    matrices = sum(count * rows_in * rows_out for (rows_out, rows_in), count in model.matrices.items())
    always = (matrices + model.vocabulary_parameters) * model.dtype.itemsize
    sparse_layers = len(model.experts)
    found = []
    for i, ((work, _), seconds) in enumerate(zip(recorder.steps, recorder.device_seconds, strict=True)):
        if len(work) == batch and all(scheduled == 1 for _, scheduled in work):
            experts = sum(touched[i * sparse_layers : (i + 1) * sparse_layers])
            keys = sum(computed + 1 for computed, _ in work) * model.kv_bytes_per_token
            num_bytes = always + keys + experts * count_expert(model.experts[0]) * model.dtype.itemsize
            found.append((seconds, num_bytes, experts / sparse_layers))
    return [statistics.median(column) for column in zip(*found, strict=True)]


def measure_blocks(layers: Any, model: Model, batch: int, touched: list[int]) -> Any:
    """Like measure_steps, but run only the expert blocks of all layers, one after another."""
    inputs: Any = SimpleNamespace(slots=torch.arange(batch))
    found = []
    for _ in range(12):
        x = torch.randn(len(layers), batch, model.config.hidden_size).to(model.dtype)
        touched.clear()
        start = time.perf_counter()
        for layer, rows in zip(layers, x, strict=True):
            layer.mlp(rows, inputs)
        seconds = time.perf_counter() - start
        routers = sum(layer.mlp.gate.weight.numel() for layer in layers)
        num_bytes = (sum(touched) * count_expert(model.experts[0]) + routers) * model.dtype.itemsize
        found.append((seconds, num_bytes, sum(touched) / len(model.experts)))
    return [statistics.median(column) for column in zip(*found[2:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a shape with experts (default: qwen3-30b-a3b)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="(default: 6)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="(default: 1 8 32)")
    parser.add_argument("--output-len", type=int, default=24, metavar="N", help="(default: 24)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        config = preset_config(args.model) | {"num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = Model(fetch_config(folder), dtype)
        options: dict[str, Any] = {"dtype": args.dtype, "device": "cpu", "attention_backend": "cpu"}
        llm = LLM(folder, load_format="dummy", max_model_len=1024, max_num_seqs=max(args.batches), **options)
    print(f"commit {commit()}, {torch.get_num_threads()} threads, {model.sizes.num_parameters / 1e9:.2f} B parameters")
    with llm, torch.inference_mode():
        runner: Any = llm.engine.runner
        touched = count_touched(runner.model)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        for batch in args.batches:
            rate = measure_machine(torch.device("cpu"), dtype).bandwidth
            step = measure_steps(llm, model, batch, args.output_len, touched)
            block = measure_blocks(runner.model.layers, model, batch, touched)
            for name, (seconds, num_bytes, experts) in (("step", step), ("expert blocks", block)):
                floor = num_bytes / rate
                print(
                    f"batch {batch:2d} {name:13s} {1e3 * seconds:7.1f} ms, {experts:5.1f} experts a layer, "
                    f"{num_bytes / 1e9:.2f} GB: floor {1e3 * floor:7.1f} ms at {rate / 1e9:.1f} GB/s, "
                    f"{seconds / floor:.2f} x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
