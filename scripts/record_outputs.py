"""Records what the engine computes and its public interface, and compares them later: a move of code changes nothing.

    python scripts/record_outputs.py save FILE                          before the first change
    python scripts/record_outputs.py compare FILE --only torch cpu      after each change
    python scripts/record_outputs.py compare FILE                       at the end

It draws 300 requests for plain torch (one thread) and for the C++ kernels, in float32 and bfloat16, and 20 each for
Triton's interpreter, two tensor ranks and two stages. The engines are tiny and random, or the built-in model. FILE is
JSON: {"kind/dtype/engine": [what each request gave]}, with all bits of each number. Its "interface" is what `help` says
of each public name, and --help of each command.

The exit status of `compare` is 1 if anything differs. Compare on the machine that recorded: another processor or torch
may round otherwise. Helpers of the tests make the checkpoints. One engine needs peft, and requests with structured
outputs need llguidance.
"""

import argparse
import hashlib
import itertools
import json
import os
import pydoc
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = ("api.md", "porting.md", "ray.md", "evaluation.md")
"""Public is what `nanovllm` exports, and what these pages import or list."""
VOCAB_SIZE = 500
"""Of the random models. The built-in model has more tokens."""
LONGEST = 2000
"""Of a longer text the hash is recorded."""
BLOCKS = {"kvcache_block_size": 16, "num_kvcache_blocks": 256, "max_model_len": 256}
SMALL_POOL = {"num_kvcache_blocks": 16, "max_num_seqs": 8}
SMALL_BUDGET = {"max_num_batched_tokens": 19, "enable_prefix_caching": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT = {"model": "tiny-qwen3", "num_speculative_tokens": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}

Recording = dict[str, list[dict[str, str]]]


class Engine(NamedTuple):
    """One of the engines that are recorded, the number of its requests, and its model: see `save_model`."""

    num_requests: int
    model: str
    options: Mapping[str, Any] = {}


ENGINES = {
    "text": Engine(60, "tiny-qwen3"),
    "text, small pool": Engine(30, "tiny-qwen3", SMALL_POOL),
    "text, ngram drafts": Engine(20, "tiny-qwen3", {"speculative_config": NGRAM}),
    "text, drafts of a model": Engine(10, "tiny-qwen3", {"speculative_config": DRAFT}),
    "qwen3": Engine(30, "Qwen3"),
    "qwen3, small pool": Engine(30, "Qwen3", SMALL_POOL),
    "qwen3, small budget": Engine(20, "Qwen3", SMALL_BUDGET),
    "qwen2": Engine(10, "Qwen2"),
    "llama": Engine(10, "Llama"),
    "experts": Engine(20, "Qwen3Moe"),
    "hybrid": Engine(20, "hybrid", {"max_num_batched_tokens": 48}),
    "int8": Engine(5, "Qwen3", {"quantization": "int8"}),
    "int8, experts": Engine(5, "Qwen3Moe", {"quantization": "int8"}),
    "int8-dynamic": Engine(5, "Qwen3", {"quantization": "int8-dynamic"}),
    "awq": Engine(5, "awq"),
    "gptq": Engine(5, "gptq desc_act"),
    "packed": Engine(5, "packed with zeros"),
    "fp8": Engine(5, "fp8 blocks"),
    "lora": Engine(5, "Qwen3", {"lora": "adapter"}),
}
FEW = ("text", "qwen3, small pool", "experts", "hybrid")
"""Engines for what is slow."""


class Kind(NamedTuple):
    """A way to compute. All its engines of one dtype run in a process of their own."""

    options: Mapping[str, Any]
    environment: Mapping[str, str] = {}
    dtypes: Seq[str] = ("float32",)
    engines: Seq[str] = FEW
    most_requests: int = 5
    """Of an engine."""
    most_tokens: int = 40
    """Of an output."""


BOTH = ("float32", "bfloat16")
# Stages promise the bits of one rank with the C++ kernels only: with plain torch bits depend on a step's batch.
KINDS = {
    "torch": Kind({"attention_backend": "torch"}, {}, BOTH, tuple(ENGINES), 60),
    "cpu": Kind({"attention_backend": "cpu"}, {"OMP_NUM_THREADS": "2"}, BOTH, tuple(ENGINES), 60),
    "triton": Kind({"attention_backend": "triton"}, {"TRITON_INTERPRET": "1"}, most_tokens=4),
    "ranks": Kind({"attention_backend": "torch", "tensor_parallel_size": 2}),
    "stages": Kind({"attention_backend": "cpu", "pipeline_parallel_size": 2}),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


# ---- What the engine computes

WORDS = ["the cat", "what is 3 + 4?", "once upon a time there was", "sort: c a b", "the sun and the dog", "9 - 5 ="]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS = [{"choice": ["yes", "no", "maybe"]}, {"regex": "[a-c]{2,9}[0-9]"}, {"json": SCHEMA}, {"json_object": True}]


def save_model(model: str, folder: Path) -> str:
    """Write a random model to a folder: of a family, or in a form of `helpers.quantized.CHECKPOINTS`."""
    import transformers
    from helpers import adapters, hybrids, quantized, tiny

    if model == "tiny-qwen3":
        return model
    if model == "hybrid":
        hybrids.save_hybrid(folder)
    elif model in quantized.CHECKPOINTS:
        whole = folder / "whole"
        tiny.save_random(whole, model_class=transformers.Qwen2ForCausalLM, num_hidden_layers=1)
        folder, _ = quantized.save_quantised(whole, folder, *quantized.CHECKPOINTS[model])
    else:
        changes = EXPERTS if model == "Qwen3Moe" else {}
        saved = tiny.save_random(folder, model_class=getattr(transformers, f"{model}ForCausalLM"), **changes)
        if model == "Qwen3":
            adapters.save_adapter(saved, folder / "adapter")
    return str(folder)


def draw_params(draw: random.Random, takes_text: bool, most_tokens: int) -> dict[str, Any]:
    """Draw the fields of a request's SamplingParams."""
    params: dict[str, Any] = {"max_tokens": draw.randint(1, most_tokens), "temperature": 0.0}
    if draw.random() < 0.6:
        params |= {
            "temperature": draw.choice([0.4, 0.8, 1.0, 1.5]),
            "top_k": draw.choice([0, 0, 5, 50]),
            "top_p": draw.choice([1.0, 0.9, 0.5]),
            "min_p": draw.choice([0.0, 0.0, 0.05]),
            "seed": draw.choice([None, draw.randrange(1000)]),
            "n": draw.choice([1, 1, 1, 2, 3]),
        }
    tokens = draw.sample(range(VOCAB_SIZE), 60)
    extras: list[dict[str, Any]] = [
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        {"logit_bias": {token: draw.uniform(-5, 5) for token in tokens[:5]}},
        {"allowed_token_ids": tokens, "stop_token_ids": tokens[:9]},
        {"min_tokens": 1, "ignore_eos": True},
        {"logprobs": draw.choice([0, 5, 10**6])},
        {"prompt_logprobs": draw.choice([0, 3, 10**6])},
    ]
    if takes_text:
        form = {"structured_outputs": draw.choice(FORMS), "max_tokens": most_tokens}
        stop = {"stop": [draw.choice("aeinot"), "the"], "include_stop_str_in_output": draw.random() < 0.5}
        extras += [form, form, stop, {"bad_words": ["the", "cat is", "7"]}, {"detokenize": False}]
    for extra in draw.sample(extras, draw.choice([0, 1, 1, 2, 2])):
        if not {"stop", "detokenize"} <= params.keys() | extra.keys():
            params |= extra
    if "structured_outputs" in params:
        params.pop("ignore_eos", None)
    return params


def draw_prompt(draw: random.Random, takes_text: bool) -> Any:
    """Draw a text, or token ids. Some begin as others do; some end at the end of a block."""
    if takes_text:
        return " ".join(draw.choice(WORDS) for _ in range(draw.choice([1, 1, 2, 3, 12])))
    tokens = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 7, 15, 16, 17, 33, 64, 65]))]
    return draw.choice([[], list(range(40))]) + tokens


def as_text(value: Any) -> str:
    """Return the text of a value, with all bits of its numbers, or the hash of a long text."""
    text = repr(value)
    return text if len(text) <= LONGEST else hashlib.sha256(text.encode()).hexdigest()


def record_engine(name: str, kind: Kind, dtype: str) -> list[dict[str, str]]:
    """Run the requests of one engine, and return what each of them gave.

    Of ten requests one is scored, one is embedded, and the others are generated. How many drafts are verified depends
    on how long steps take, so the clock of engines with drafts counts its readings.
    """
    from nanovllm import LLM, SamplingParams

    engine = ENGINES[name]
    draw = random.Random(name)
    takes_text = engine.model == "tiny-qwen3"
    prompts = [draw_prompt(draw, takes_text) for _ in range(min(engine.num_requests, kind.most_requests))]
    params = [draw_params(draw, takes_text, kind.most_tokens) for _ in prompts]
    rest = [i for i in range(len(prompts)) if i % 10 > 1]
    clock = itertools.count().__next__ if "drafts" in name else time.perf_counter
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(time, "perf_counter", clock):
        options = {"device": "cpu", "dtype": dtype} | BLOCKS | engine.options | kind.options
        if "lora" in options:
            options["lora"] = f"{folder}/{options['lora']}"
        with LLM(save_model(engine.model, Path(folder)), **options) as llm:
            given = [
                *llm.score(prompts[::10], prompts[1::10], use_tqdm=False),
                *(vector.to_dict() for vector in llm.embed(prompts[1::10], use_tqdm=False, dimensions=40)),
            ]
            chosen = [SamplingParams(**params[i]) for i in rest]
            outputs = llm.generate([prompts[i] for i in rest], chosen, use_tqdm=False)
            given += [{"request": params[i]} | output.to_dict() for i, output in zip(rest, outputs, strict=True)]
            given.append(llm.stats())
    return [{quantity: as_text(value) for quantity, value in one.items()} for one in given]


# ---- The public interface


def find_names() -> list[tuple[str, str]]:
    """Return the public names, each with its module."""
    import nanovllm

    names = {("nanovllm", name) for name in nanovllm.__all__}
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        names.update(re.findall(r"^::: (nanovllm\.[\w.]+)\.(\w+)$", text, re.MULTILINE))
        for module, found in re.findall(r"from (nanovllm[\w.]*) import (\w+(?:, \w+)*)", text):
            names.update((module, name) for name in found.split(", "))
    return sorted(names)


def run_help(*command: str) -> str:
    """Return the --help of the program, or of one of its commands."""
    arguments = [sys.executable, "-P", "-m", "nanovllm", *command, "--help"]
    return subprocess.run(arguments, env=os.environ | {"COLUMNS": "500"}, capture_output=True, text=True).stdout


def describe(module: str, name: str) -> str:
    """Return what `help` says of a name, without modules of the package: a class that is not public may move."""
    value = getattr(__import__(module, fromlist=[name]), name)
    return re.sub(r"\bnanovllm\.(\w+\.)*", "", pydoc.plaintext.document(value, name))


def record_interface() -> list[dict[str, str]]:
    """Return the lines of what `help` says of each public name, and those of the --help of each command."""
    texts = {f"{module}.{name}": describe(module, name) for module, name in find_names()}
    texts["--help"] = run_help()
    for command in re.findall(r"^    (\S+)", texts["--help"].partition("COMMAND\n")[2], re.MULTILINE):
        texts[f"{command} --help"] = run_help(command)
    return [{"request": name} | {line: line for line in text.splitlines()} for name, text in texts.items()]


# ---- The command


def record(only: Seq[str]) -> Recording:
    """Record the engines whose kind and dtype begin with one of `only`, and the interface if it does, too."""
    recording: Recording = {}
    for name, kind in KINDS.items():
        for process in (f"{name}/{dtype}" for dtype in kind.dtypes):
            if process.startswith(tuple(only)):
                since = time.perf_counter()
                command = [sys.executable, __file__, "child", process]
                environment = os.environ | ENVIRONMENT | kind.environment
                child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                recording |= json.loads(child.stdout)
                print(f"{process}: {time.perf_counter() - since:.0f} s", flush=True)
    if "interface".startswith(tuple(only)):
        recording["interface"] = record_interface()
    return recording


def find_differences(before: Recording, after: Recording) -> list[str]:
    """Return a line for each quantity of `after` that is not as it was."""
    differences = []
    for name, requests in after.items():
        for i, (was, request) in enumerate(itertools.zip_longest(before.get(name, []), requests, fillvalue={})):
            for quantity in sorted(was.keys() | request.keys()):
                if was.get(quantity) != request.get(quantity):
                    place = f"{name}, request {i} ({request.get('request', '')}): {quantity}"
                    differences.append(f"{place} was {was.get(quantity)!s:.300} and is {request.get(quantity)!s:.300}")
    return differences


def main(arguments: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="START", help="as torch, cpu/float32, interface")
    options = parser.parse_args(arguments)
    recording = record(options.only)
    num_requests = sum(map(len, recording.values()))
    if options.command == "save":
        options.file.write_text(json.dumps(recording))
        print(f"{num_requests} requests, counts and names are recorded in {options.file}")
        return 0
    differences = find_differences(json.loads(options.file.read_text()), recording)
    print(f"{num_requests} requests, counts and names are compared", end="; ")
    print(f"{len(differences)} differ; the first: {differences[0]}" if differences else "all are equal")
    return bool(differences)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.path.append(str(ROOT / "tests"))
        name, dtype = sys.argv[2].split("/")
        kind = KINDS[name]
        print(json.dumps({f"{name}/{dtype}/{engine}": record_engine(engine, kind, dtype) for engine in kind.engines}))
    else:
        sys.exit(main())
