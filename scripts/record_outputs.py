"""Records what the engine computes, and compares it later, bit for bit: a move of code must change nothing.

    python scripts/record_outputs.py save FILE                          before the first change
    python scripts/record_outputs.py compare FILE --only torch cpu      after each change
    python scripts/record_outputs.py compare FILE                       at the end

It draws 300 requests for plain torch (one thread) and for the C++ kernels, in float32 and bfloat16, and 20 each for
Triton's interpreter, two tensor ranks and two stages. The engines are tiny and random, or the built-in model. FILE is
JSON: {"kind/dtype/engine": [what each request gave]}. Floats are hexadecimal, so they are compared by their bits. The
logits are recorded as a hash of the log-probabilities of the whole vocabulary, for some of the requests.

The exit status of `compare` is 1 if anything differs. Compare on the machine that recorded: another processor or torch
may round otherwise. Helpers of the tests make the checkpoints. One engine needs peft, and requests with structured
outputs need llguidance.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import nanovllm

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = 500
"""Of the random models. The built-in model has more tokens."""
BLOCKS = {"kvcache_block_size": 16, "num_kvcache_blocks": 256, "max_model_len": 256}
SMALL_POOL = {"num_kvcache_blocks": 16, "max_num_seqs": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}

Save = Callable[[Path], Path | str]
Recording = dict[str, list[dict[str, Any]]]


# ---- The models


def save_random(family: str, **changes: Any) -> Save:
    """Return a function that writes a random model of a family of transformers to a folder."""

    def save(folder: Path) -> Path:
        import transformers
        from helpers import tiny

        tiny.save_random(folder, model_class=getattr(transformers, f"{family}ForCausalLM"), **changes)
        return folder

    return save


def save_hybrid(folder: Path) -> Path:
    from helpers import hybrids

    hybrids.save_hybrid(folder)
    return folder


def save_quantised(form: str) -> Save:
    """Return a function that writes a random model in a form of `helpers.quantized.CHECKPOINTS` to a folder."""

    def save(folder: Path) -> Path:
        from helpers import quantized

        whole = save_random("Qwen2", num_hidden_layers=1)(folder / "whole")
        return quantized.save_quantised(Path(whole), folder, *quantized.CHECKPOINTS[form])[0]

    return save


def save_adapted(folder: Path) -> Path:
    """Write a random model to a folder, and a random adapter of it to its subfolder "adapter"."""
    import peft
    from helpers import tiny

    model = tiny.save_random(folder)
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder


def name_built_in(folder: Path) -> str:
    return "tiny-qwen3"


class Engine(NamedTuple):
    """One of the engines that are recorded, and the number of its requests."""

    num_requests: int
    save: Save
    options: Mapping[str, Any] = {}

    @property
    def takes_text(self) -> bool:
        return self.save is name_built_in


ENGINES = {
    "text": Engine(60, name_built_in),
    "text, small pool": Engine(30, name_built_in, SMALL_POOL),
    "text, ngram drafts": Engine(20, name_built_in, {"speculative_config": NGRAM}),
    "text, drafts of a model": Engine(
        10, name_built_in, {"speculative_config": {"model": "tiny-qwen3", "num_speculative_tokens": 3}}
    ),
    "qwen3": Engine(30, save_random("Qwen3")),
    "qwen3, small pool": Engine(30, save_random("Qwen3"), SMALL_POOL),
    "qwen3, small budget": Engine(
        20, save_random("Qwen3"), {"max_num_batched_tokens": 19, "enable_prefix_caching": False}
    ),
    "qwen2": Engine(10, save_random("Qwen2", tie_word_embeddings=False)),
    "llama": Engine(10, save_random("Llama", num_key_value_heads=1)),
    "experts": Engine(20, save_random("Qwen3Moe", **EXPERTS)),
    "hybrid": Engine(20, save_hybrid, {"max_num_batched_tokens": 48}),
    "int8": Engine(5, save_random("Qwen3"), {"quantization": "int8"}),
    "int8, experts": Engine(5, save_random("Qwen3Moe", **EXPERTS), {"quantization": "int8"}),
    "int8-dynamic": Engine(5, save_random("Qwen3"), {"quantization": "int8-dynamic"}),
    "awq": Engine(5, save_quantised("awq")),
    "gptq": Engine(5, save_quantised("gptq desc_act")),
    "packed": Engine(5, save_quantised("packed with zeros")),
    "fp8": Engine(5, save_quantised("fp8 blocks")),
    "lora": Engine(5, save_adapted, {"lora": "adapter"}),
}
FEW = {
    "text": ENGINES["text"]._replace(num_requests=6),
    "qwen3": ENGINES["qwen3, small pool"]._replace(num_requests=6),
    "experts": ENGINES["int8, experts"]._replace(num_requests=4),
    "hybrid": ENGINES["hybrid"]._replace(num_requests=4),
}
"""Engines for what is slow."""


class Kind(NamedTuple):
    """A way to compute: each dtype of it runs all engines in a process of its own."""

    engines: Mapping[str, Engine]
    dtypes: Seq[str]
    options: Mapping[str, Any]
    environment: Mapping[str, str] = {}
    most_tokens: int = 40
    """The most tokens of an output."""


# Stages promise the bits of one rank with the C++ kernels only: with plain torch bits depend on a step's batch.
KINDS = {
    "torch": Kind(ENGINES, ["float32", "bfloat16"], {"attention_backend": "torch"}),
    "cpu": Kind(ENGINES, ["float32", "bfloat16"], {"attention_backend": "cpu"}, {"OMP_NUM_THREADS": "2"}),
    "triton": Kind(FEW, ["float32"], {"attention_backend": "triton"}, {"TRITON_INTERPRET": "1"}, 4),
    "ranks": Kind(FEW, ["float32"], {"attention_backend": "torch", "tensor_parallel_size": 2}),
    "stages": Kind(FEW, ["float32"], {"attention_backend": "cpu", "pipeline_parallel_size": 2}),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


# ---- The requests

WORDS = ["the cat", "what is 3 + 4?", "once upon a time there was", "sort: c a b", "the sun and the dog", "9 - 5 ="]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS = [{"choice": ["yes", "no", "maybe"]}, {"regex": "[a-c]{2,9}[0-9]"}, {"json": SCHEMA}, {"json_object": True}]


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
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"logit_bias": {token: draw.uniform(-5, 5) for token in tokens[:5]}},
        {"allowed_token_ids": tokens},
        {"stop_token_ids": tokens},
        {"min_tokens": 1, "ignore_eos": True},
        {"logprobs": draw.choice([0, 1, 5])},
        {"logprobs": 10**6},
        {"prompt_logprobs": draw.choice([0, 3])},
        {"prompt_logprobs": 10**6},
    ]
    if takes_text:
        extras += [
            {"stop": [draw.choice("aeinot"), "the"], "include_stop_str_in_output": draw.random() < 0.5},
            {"bad_words": draw.sample(["the", "a", "cat is", "7"], 2)},
            {"detokenize": False},
            *({"structured_outputs": form, "max_tokens": most_tokens} for form in FORMS),
        ]
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


# ---- What they give


def as_plain(value: Any) -> Any:
    """Return a value as JSON has it, with floats by their bits."""
    if isinstance(value, float):
        return float(value).hex()
    if isinstance(value, Mapping):
        return {str(key): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(entry) for entry in value]
    return value


def as_logprobs(logprobs: Any) -> Any:
    """Return log-probabilities with their ranks, by token id; those of the whole vocabulary as a hash."""
    plain = as_plain([{token: (p, p.rank) for token, p in sorted((row or {}).items())} for row in logprobs or []])
    if max(map(len, plain), default=0) < VOCAB_SIZE:
        return plain
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def read_output(output: Any) -> dict[str, Any]:
    """Return everything that a request of `generate` gave."""
    return {
        "tokens": [one.token_ids for one in output.outputs],
        "text": [one.text for one in output.outputs],
        "end": [[one.finish_reason, one.stop_reason] for one in output.outputs],
        "logprobs": [as_logprobs(one.logprobs) for one in output.outputs],
        "prompt_logprobs": as_logprobs(output.prompt_logprobs),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }


def record_engine(name: str, kind: Kind, dtype: str) -> list[dict[str, Any]]:
    """Run the requests of one engine, and return what each of them gave.

    Of ten requests one is scored, one is embedded, and the others are generated.
    """
    from nanovllm import LLM, SamplingParams

    engine = kind.engines[name]
    draw = random.Random(name)
    prompts = [draw_prompt(draw, engine.takes_text) for _ in range(engine.num_requests)]
    params = [draw_params(draw, engine.takes_text, kind.most_tokens) for _ in prompts]
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": engine.save(Path(folder)), "device": "cpu", "dtype": dtype}
        options |= BLOCKS | engine.options | kind.options
        if "lora" in options:
            options["lora"] = str(Path(folder) / options["lora"])
        with LLM(**options) as llm:
            scores = llm.score(prompts[::10], prompts[1::10], use_tqdm=False)
            vectors = llm.embed(prompts[1::10], use_tqdm=False, dimensions=40)
            rest = [i for i in range(len(prompts)) if i % 10 > 1]
            chosen = [SamplingParams(**params[i]) for i in rest]
            outputs = llm.generate([prompts[i] for i in rest], chosen, use_tqdm=False)
            stats = llm.stats()
    return [
        *({"score": as_plain(score)} for score in scores),
        *({"embedding": as_plain(vector.embedding.tolist())} for vector in vectors),
        *({"request": params[i]} | read_output(output) for i, output in zip(rest, outputs, strict=True)),
        {"stats": stats},
    ]


def record_here(names: Seq[str]) -> Recording:
    """Record some engines of one kind and dtype in this process.

    How many drafts are verified depends on how long steps take. So the clock of these engines counts its readings.
    """
    clock = time.perf_counter
    recording: Recording = {}
    for name in names:
        kind, dtype, engine = name.split("/")
        time.perf_counter = itertools.count().__next__ if "drafts" in engine else clock  # type: ignore[assignment]
        recording[name] = record_engine(engine, KINDS[kind], dtype)
    return recording


# ---- The command


def choose_names(only: Seq[str]) -> list[str]:
    """Return the names of the recordings that begin with one of `only`."""
    names = [
        f"{label}/{dtype}/{engine}" for label, kind in KINDS.items() for dtype in kind.dtypes for engine in kind.engines
    ]
    if unknown := [start for start in only if not any(name.startswith(start) for name in names)]:
        raise ValueError(f"--only {unknown[0]}: the recordings are {', '.join(names)}")
    return [name for name in names if name.startswith(tuple(only))]


def record(names: Seq[str]) -> Recording:
    """Record engines, each kind and dtype in a process of its own."""
    print(f"the engine in {Path(nanovllm.__file__).parent}", flush=True)
    recording: Recording = {}
    for process, group in itertools.groupby(names, lambda name: name.rpartition("/")[0]):
        since = time.perf_counter()
        kind = KINDS[process.split("/")[0]]
        environment = os.environ | ENVIRONMENT | kind.environment
        command = [sys.executable, __file__, "child", *group]
        recording |= json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        print(f"{process}: {time.perf_counter() - since:.0f} s", flush=True)
    return recording


def find_differences(before: Recording, after: Recording) -> list[str]:
    """Return a line for each quantity of `after` that is not as it was."""
    differences = []
    for name, requests in after.items():
        for i, request in enumerate(requests):
            was = before[name][i] if i < len(before.get(name, [])) else {}
            for quantity in sorted(was.keys() | request.keys()):
                if was.get(quantity) != request.get(quantity):
                    place = f"{name}, request {i} ({request.get('request', '')}): {quantity}"
                    differences.append(f"{place} was {was.get(quantity)!s:.300} and is {request.get(quantity)!s:.300}")
    return differences


def main(arguments: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="as torch, cpu/float32, torch/float32/int8"
    )
    options = parser.parse_args(arguments)
    recording = record(choose_names(options.only))
    num_requests = sum(map(len, recording.values()))
    if options.command == "save":
        options.file.write_text(json.dumps(recording))
        print(f"{num_requests} requests and counts are recorded in {options.file}")
        return 0
    differences = find_differences(json.loads(options.file.read_text()), recording)
    print(f"{num_requests} requests and counts are compared", end="; ")
    print(f"{len(differences)} differ; the first: {differences[0]}" if differences else "all are equal")
    return bool(differences)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.path.append(str(ROOT / "tests"))
        print(json.dumps(record_here(sys.argv[2:])))
    else:
        sys.exit(main())
