"""Shows how far prompt log-probabilities of a GGUF file are from those of its weights, here and in llama.cpp.

    python benchmarks/evidence/gguf_distance.py FILE... --llama-cpp-python DIR/bin/python
    python benchmarks/evidence/gguf_distance.py FILE... --llama-cpp-python DIR/bin/python \
        --save benchmarks/results/zen4-gguf.json

The measure is transformers' model in float32, with the numbers into which the gguf package turns the file. A distance
is the absolute difference of one token's log-probability, over prompts of random ids. llama.cpp multiplies rounded
inputs; its keys and values are in float16. For files of qwen2 and qwen3, whose rows are as transformers has them.
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.bench_compare import run_engine
from benchmarks.figures import update
from nanovllm import LLM, SamplingParams
from nanovllm.apps.estimate import fetch_config

Scores = list[list[float]]
"""The log-probability of each token but the first, of each prompt."""


def score_by_transformers(file: Path, prompts: list[list[int]]) -> Scores:
    import gguf
    from transformers import AutoModelForCausalLM

    config = fetch_config(str(file))
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            tensor = tensors[names.get_name(name, (".weight", ".bias"))]
            parameter.copy_(torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).view(parameter.shape))
        return [pick(model(torch.tensor([prompt])).logits[0], prompt) for prompt in prompts]


def pick(logits: torch.Tensor, prompt: list[int]) -> list[float]:
    """Return the log-probability of each token but the first; logits are [tokens, vocabulary]."""
    logprobs = logits[:-1].double().log_softmax(-1)
    found: list[float] = logprobs[torch.arange(len(prompt) - 1), prompt[1:]].tolist()
    return found


def score_here(file: Path, prompts: list[list[int]], dtype: str) -> Scores:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    longest = max(map(len, prompts))
    options: dict[str, Any] = {"device": "cpu", "attention_backend": "cpu", "max_model_len": longest + 1}
    options |= {"kvcache_memory_bytes": 1 << 30, "max_num_seqs": len(prompts)}
    with LLM(str(file), dtype=dtype, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(output["prompt_logprobs"][1:], prompt[1:], strict=True)]
        for output, prompt in zip(outputs, prompts, strict=True)
    ]


def score_by_llama_cpp(python: str, file: Path, prompts: list[list[int]]) -> Scores:
    workload = {"prompts": prompts, "output_lens": [1] * len(prompts)}
    spec = {"scores": True, "model": str(file), "dtype": "bfloat16", "threads": torch.get_num_threads()}
    spec |= {"temperature": 0, "max_num_seqs": 1, "workload": workload}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as scratch:
        json.dump(spec, scratch)
        scratch.flush()
        document = run_engine([python, "-m", "benchmarks.rivals.llama_cpp", scratch.name], None, None)
    found: Scores = document["logprobs"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE")
    add("--llama-cpp-python", required=True, metavar="PYTHON", help="as scripts/rival_env.sh llama-cpp makes one")
    add("--lengths", nargs="+", type=int, default=[33, 100, 256], help="tokens of each prompt")
    add("--save", type=Path, help="write the table into this file of benchmarks/results")
    args = parser.parse_args()
    columns: list[str] = []
    rows: dict[str, list[str]] = {"ours, float32": [], "ours, bfloat16": [], "llama.cpp": []}
    for file in args.files:
        size = fetch_config(str(file)).vocab_size
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(size, (length,), generator=generator).tolist() for length in args.lengths]
        wanted = flatten(score_by_transformers(file, prompts))
        columns += [f"{name_type(file)}, {kind}" for kind in ("mean", "largest")]
        for name, found in {
            "ours, float32": score_here(file, prompts, "float32"),
            "ours, bfloat16": score_here(file, prompts, "bfloat16"),
            "llama.cpp": score_by_llama_cpp(args.llama_cpp_python, file, prompts),
        }.items():
            distances = (flatten(found) - wanted).abs()
            rows[name] += [f"{distances.mean():.7f}", f"{distances.max():.7f}"]
            print(f"{file.name:40} {name:16} mean {distances.mean():.7f}, largest {distances.max():.7f}", flush=True)
    if args.save:
        update(args.save, {"distances": {"columns": columns, "rows": rows}})


def flatten(scores: Scores) -> torch.Tensor:
    return torch.tensor(list(itertools.chain(*scores)), dtype=torch.float64)


def name_type(file: Path) -> str:
    """Return the type that a file's name ends with."""
    return file.stem.rpartition("-")[2]


if __name__ == "__main__":
    main()
