"""Measures what quantised weights, or a KV cache of bytes, cost: perplexity, KL divergence, equal most likely tokens.

    python benchmarks/bench_quality.py MODEL                        a folder or a Hugging Face id
    python benchmarks/bench_quality.py tiny-qwen3 --chats 300       the built-in model, on questions of its own kind
    python benchmarks/bench_quality.py random                       a model of six layers with random weights
    python benchmarks/bench_quality.py random --outliers 50         a wide one; few inputs are 50 times the others
    python benchmarks/bench_quality.py MODEL --checkpoint PATH      also a checkpoint, or a GGUF, of this model
    python benchmarks/bench_quality.py tiny-qwen3 --chats 300 --formats --gguf Q4_0 Q4_K_M --llama-cpp-python PYTHON
                                                                    only these types of llama.cpp (gguf_files.py)

The reference is the unquantised model in float32. Each format scores the same tokens as the reference does, a window
of tokens at a time: so only the logits of one window are in memory, twice. The text ships with Python (its licence and
the topics of its help) and with this repository (docs/*.md), unless --text names files.

Perplexity is exp of the mean negative log-likelihood of a token. KL is the mean, over tokens, of the divergence of the
format's distribution from the reference's, in nats. "Same top" is the share of tokens before which both find the same
token most likely. "Bits" are those of a GGUF's tensors, by their weights. Results are kept in a file, window by window:
run the command again to go on after an interruption.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gguf_files import BUILT_IN, CannotQuantize, count_bytes, quantize, write_source
from nanovllm import LLM
from nanovllm.features.quantized.codes import Codes, Scales, pack_int4, quantize_int8
from nanovllm.models.hub import find_model

ROOT = Path(__file__).resolve().parents[1]
ROWS = 64
"""Rows of logits that are compared at a time."""
OUTLIERS = 4
"""Inputs of a matrix that --outliers makes larger."""
NOT_MATRICES = ("norm", "bias")
EMBEDDINGS = ("embed_tokens", "lm_head")


class Format(NamedTuple):
    """A line of the table.

    Attributes:
        options: the options of `LLM` that make it.
        rounding: None for the checkpoint as it is. Else "int8" or the group size of int4: the matrices of a copy of the
            checkpoint are rounded and stored in float32.
        with_head: whether the embedding and the LM head are rounded, too.
    """

    options: dict[str, Any]
    rounding: str | int | None = None
    with_head: bool = False


FORMATS = {
    "bfloat16": Format({"dtype": "bfloat16"}),
    "bfloat16, KV cache in int8": Format({"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "float32, KV cache in int8": Format({"dtype": "float32", "kv_cache_dtype": "int8"}),
    "int8, computed in bfloat16": Format({"dtype": "bfloat16", "quantization": "int8"}),
    "int8, computed in float32": Format({"dtype": "float32", "quantization": "int8"}),
    "int8-dynamic, in bfloat16": Format({"dtype": "bfloat16", "quantization": "int8-dynamic"}),
    "int8-dynamic, in float32": Format({"dtype": "float32", "quantization": "int8-dynamic"}),
    "w8a8, in bfloat16": Format({"dtype": "bfloat16", "quantization": "w8a8", "attention_backend": "torch"}),
    "w8a8, in float32": Format({"dtype": "float32", "quantization": "w8a8", "attention_backend": "torch"}),
    "int8 without the head, in float32": Format({"dtype": "float32"}, "int8"),
    "int4 by rounding, groups of 32, in float32": Format({"dtype": "float32"}, 32),
    "int4 by rounding, groups of 128, in float32": Format({"dtype": "float32"}, 128),
}


class Window(NamedTuple):
    """Tokens to score after tokens that are only read."""

    prompt: list[int]
    continuation: list[int]


class Tally(NamedTuple):
    """Sums over the tokens of a window: negative log-likelihoods of the format and of the reference, KL, equal tops."""

    num_tokens: int
    loss: float
    reference_loss: float
    divergence: float
    num_same: int


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with ExitStack() as stack:
        if args.model == "random":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "random"
            write_random(folder, args)
        else:
            folder = find_model(args.model).resolve()
        files = {path.name: path for path in args.checkpoint}
        refused = {}
        if args.gguf:
            source = write_source(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            made, refused = make_files(source, args.gguf, args.llama_cpp_python)
            files |= made
        compare(folder, files, args)
    for kind, reason in refused.items():
        print(f"{kind} is not in the table: {reason}")


def make_files(source: Path, kinds: list[str], python: str | None) -> tuple[dict[str, Path], dict[str, str]]:
    """Write a GGUF in each type. Return the files by the names of their lines, and why some types are not among them.

    Args:
        source: the file in BF16.
        python: an interpreter that has llama.cpp; None for the `gguf` package.
    """
    files = {}
    refused = {}
    for kind in kinds:
        try:
            path = quantize(source, kind, python)
        except CannotQuantize as error:
            refused[kind] = str(error)
        else:
            files[kind if python or path == source else f"{kind}, by the gguf package"] = path
    return files, refused


def write_random(folder: Path, args: argparse.Namespace) -> None:
    """Write a model of random weights for the built-in tokenizer. They are scaled as those of the tests' models."""
    sys.path.insert(0, str(ROOT / "tests"))
    source = find_model("tiny-qwen3")
    sizes = {"vocab_size": json.loads((source / "config.json").read_text())["vocab_size"]}
    sizes |= {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "max_position_embeddings": 4096}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    if args.outliers:
        sizes |= {"hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 3072}
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8}
        sizes["tie_word_embeddings"] = False  # a larger embedding changes no logit by itself
    importlib.import_module("helpers.tiny").save_random(folder, **sizes)
    if args.outliers:
        enlarge_inputs(folder / "model.safetensors", args.outliers, args.first_token)
    for path in (*source.glob("tokenizer*.json"), source / "generation_config.json"):
        shutil.copy(path, folder)


def enlarge_inputs(checkpoint: Path, factor: float, in_first_token: bool) -> None:
    """Make a few inputs `factor` times as large: of all layers' matrices, or of token 0 as it is embedded.

    The weights become smaller, so that the likeliest token is less clear. Otherwise the divergence of a format that
    loses much says little.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint)
    generator = torch.Generator().manual_seed(1)
    hidden = tensors["model.norm.weight"].shape[0]
    inner = tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
    channels = torch.randperm(hidden, generator=generator)[:OUTLIERS]
    inner_channels = torch.randperm(inner, generator=generator)[:OUTLIERS]
    tensors["model.norm.weight"] /= 6
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensor /= 2
        if not in_first_token and name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[channels] *= factor
        if not in_first_token and name.endswith("up_proj.weight"):
            tensor[inner_channels] *= factor
    if in_first_token:
        embedding = tensors["model.embed_tokens.weight"]
        embedding[0, channels] = factor * embedding.std() * embedding[0, channels].sign()
    save_file(tensors, checkpoint, metadata={"format": "pt"})


def compare(folder: Path, files: dict[str, Path], args: argparse.Namespace) -> None:
    """Score all windows with the reference, with each format and with each quantised copy, and print the table."""
    formats = {name: FORMATS[name] for name in args.formats} | dict.fromkeys(files, Format({"dtype": "float32"}))
    sources = dict.fromkeys(formats, folder) | files
    results = args.results or Path(f"quality-{folder.name}.jsonl")
    with open_llm(folder, Format({"dtype": "float32"}), args.window) as reference:
        windows = make_windows(reference, args)
        mark = hashlib.sha256(repr(windows).encode()).hexdigest()[:12]
        key = {"model": folder.name, "windows": mark}
        if args.outliers:
            key |= {"outliers": args.outliers, "first token": args.first_token}
        done = read_results(results, key)
        num_done = sum(len(done.get(name, {})) for name in formats)
        bar = tqdm(total=len(windows) * len(formats), initial=num_done, desc="Windows")
        with bar, results.open("a") as file:
            for name, format in formats.items():
                left = [i for i in range(len(windows)) if i not in done.setdefault(name, {})]
                if not left:
                    continue
                bar.set_postfix_str(name)
                with open_llm(sources[name], format, args.window) as candidate:
                    for i in left:
                        tally = compare_window(candidate, reference, windows[i])
                        done[name][i] = tally
                        file.write(json.dumps({"key": key, "format": name, "index": i, "tally": tally}) + "\n")
                        file.flush()
                        bar.update()
    sizes = {name: count_bytes(path) for name, path in files.items() if path.suffix == ".gguf"}
    print_table({name: [done[name][i] for i in range(len(windows))] for name in formats}, sizes)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a folder, a Hugging Face id, tiny-qwen3 for the built-in model, or random")
    add("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), metavar="FORMAT", help="; ".join(FORMATS))
    add("--checkpoint", nargs="+", type=Path, default=[], metavar="PATH", help="quantised copies of the same model")
    add("--gguf", nargs="+", default=[], metavar="TYPE", help="also the built-in model in these types of llama.cpp")
    add("--llama-cpp-python", metavar="PYTHON", help="an interpreter with llama.cpp, which quantises to every type")
    add("--text", nargs="+", type=Path, default=[], metavar="FILE", help="files to score instead of the default text")
    add(
        "--chats", type=int, default=0, metavar="N", help="instead, N answers as the built-in model was trained to give"
    )
    add("--outliers", type=float, metavar="FACTOR", help="of a random model, how many times as large few inputs are")
    add("--first-token", action="store_true", help="with --outliers: in the first token of a window alone")
    add("--window", type=int, default=512, help="tokens of a window")
    add("--max-tokens", type=int, default=20_000, help="stop after so many tokens of text")
    add("--results", type=Path, metavar="FILE", help="where results are kept; default: quality-MODEL.jsonl")
    args = parser.parse_args(arguments)
    for name in ("window", "max_tokens"):
        if getattr(args, name) < 2:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 2")
    if args.outliers is not None and (args.model != "random" or not args.outliers >= 1):
        parser.error(f"--outliers is {args.outliers} and MODEL {args.model}; it must be at least 1, and MODEL random")
    if args.gguf and args.model != BUILT_IN:
        parser.error(f"--gguf is for {BUILT_IN}, and MODEL is {args.model}: name files with --checkpoint")
    if args.first_token and args.outliers is None:
        parser.error("--first-token says where outliers are: give --outliers FACTOR, too")
    return args


def default_text() -> str:
    """Return English text that is on every machine: Python's licence and help, and the pages of this repository."""
    licence = Path(os.__file__).parent / "LICENSE.txt"
    parts = [licence.read_text()] if licence.is_file() else []
    topics = importlib.import_module("pydoc_data.topics").topics
    parts += [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    return "\n\n".join([*parts, *(topics[name] for name in sorted(topics))])


def make_windows(llm: LLM, args: argparse.Namespace) -> list[Window]:
    """Return what is to be scored: chats, or text cut into windows of which the first token is only read."""
    tokenizer = llm.get_tokenizer()
    if args.chats:
        return make_chats(tokenizer, args.chats)
    text = "\n\n".join(path.read_text() for path in args.text) if args.text else default_text()
    # A token has some characters, so this is text enough, and tokenising a whole book would take a minute.
    ids = tokenizer(text[: 16 * args.max_tokens], add_special_tokens=False)["input_ids"][: args.max_tokens]
    starts = range(0, len(ids) - 1, args.window)
    windows = [Window(ids[i : i + 1], ids[i + 1 : i + args.window]) for i in starts if len(ids) - i > 1]
    return [Window([0], window.continuation) for window in windows] if args.first_token else windows


def make_chats(tokenizer: Any, count: int) -> list[Window]:
    """Return questions that the built-in model was not trained with, each with its right answer to be scored."""
    sys.path.insert(0, str(ROOT / "scripts"))
    data = importlib.import_module("tiny_qwen3_data")
    examples = [data.evaluation_set(skill, -(-count // len(data.SKILL_WEIGHTS))) for skill in data.SKILL_WEIGHTS]
    windows = []
    for example in [example for some in examples for example in some][:count]:
        messages = [{"role": "user", "content": example.question}]
        start = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(start, add_special_tokens=False)["input_ids"]
        windows.append(Window(prompt, tokenizer(example.answer, add_special_tokens=False)["input_ids"]))
    return windows


@contextmanager
def open_llm(folder: Path, format: Format, window: int) -> Iterator[LLM]:
    """Open an engine for one window at a time. A rounded copy of the checkpoint exists as long as the engine."""
    with ExitStack() as stack:
        if format.rounding is not None:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_rounded(folder, copy, format)
            folder = copy
        length = max(window, 256)
        limits = {"max_model_len": length, "max_num_batched_tokens": length, "max_num_seqs": 1}
        # A block that is found in the cache would not be computed, and its logits not be made.
        options = {"enable_prefix_caching": False, "enforce_eager": True, **limits, **format.options}
        yield stack.enter_context(LLM(str(folder), **options))


def write_rounded(source: Path, target: Path, format: Format) -> None:
    """Write a copy of a checkpoint in float32 whose matrices are rounded as the format says."""
    from safetensors.torch import load_file, save_file

    for path in source.iterdir():
        if path.suffix not in (".safetensors", ".bin") and path.is_file():
            shutil.copy(path, target)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            is_matrix = tensor.dim() >= 2 and not any(word in name for word in NOT_MATRICES)
            is_head = any(word in name for word in EMBEDDINGS)
            rounds = is_matrix and (format.with_head or not is_head)
            tensors[name] = round_matrix(tensor.float(), format.rounding) if rounds else tensor.float()
    save_file(tensors, target / "model.safetensors")


def round_matrix(weight: Tensor, rounding: str | int | None) -> Tensor:
    """Return float32 weights [out, in] rounded to int8 by row, or to int4 in groups of `rounding` inputs."""
    if not isinstance(rounding, int):
        return quantize_int8(weight).dequantize()
    rows, size = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -size % rounding)).view(rows, -1, rounding)
    # As formats with a fixed zero of 8 do: the largest magnitude becomes code 0 or 15, whichever side it is on.
    scales = groups.abs().amax(2).clamp(min=1e-12) / 7.5
    codes = (groups / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int16).flatten(1)[:, :size] + 8
    return Codes(4, pack_int4(codes), Scales(scales), None, rounding).dequantize()


def compare_window(candidate: LLM, reference: LLM, window: Window) -> Tally:
    """Score a window with both, and compare their distributions a few rows at a time."""
    logits = read_logits(candidate, window)
    reference_logits = read_logits(reference, window)
    targets = torch.tensor(window.continuation, device=logits.device)
    sums = torch.zeros(3, dtype=torch.float64)
    num_same = 0
    for mine, theirs, ids in zip(*(x.split(ROWS) for x in (logits, reference_logits, targets)), strict=True):
        found = mine.float().log_softmax(1)
        wanted = theirs.float().log_softmax(1)
        divergence = (wanted.exp() * (wanted - found)).sum(1)
        losses = [-values.gather(1, ids[:, None]).sum().double() for values in (found, wanted)]
        sums += torch.stack((*losses, divergence.sum().double())).cpu()
        num_same += int((found.argmax(1) == wanted.argmax(1)).sum())
    return Tally(len(targets), *sums.tolist(), num_same)


def read_logits(llm: LLM, window: Window) -> Tensor:
    """Return the logits [n, vocab] from which `LLM.score` scores the n tokens of a window.

    Raises:
        RuntimeError: they do not give the scores that `LLM.score` returned.
    """
    model = llm.engine.runner.model
    made: list[Tensor] = []
    compute = model.compute_logits

    def keep(hidden: Tensor) -> Tensor | None:
        logits: Tensor | None = compute(hidden)
        if logits is not None:
            made.append(logits)
        return logits

    model.compute_logits = keep
    try:
        (score,) = llm.score([window.prompt], [window.continuation], use_tqdm=False)
    finally:
        del model.compute_logits
    logits = torch.cat(made)[-len(window.continuation) :]
    targets = torch.tensor(window.continuation, device=logits.device)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    if len(logits) != len(targets) or not torch.allclose(-losses.cpu(), torch.tensor(score["logprobs"]), atol=1e-2):
        raise RuntimeError("the logits that were read are not those that LLM.score used")
    return logits


def read_results(path: Path, key: dict[str, Any]) -> dict[str, dict[int, Tally]]:
    """Return what an earlier run of the same measurement has written, by format and number of the window."""
    done: dict[str, dict[int, Tally]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:  # an interrupted run may end within a line
            continue
        if entry["key"] == key:
            done.setdefault(entry["format"], {})[entry["index"]] = Tally(*entry["tally"])
    return done


def print_table(results: dict[str, list[Tally]], sizes: dict[str, tuple[int, int]]) -> None:
    """Print the table in Markdown.

    Args:
        sizes: of some lines, the bytes and the number of the weights.
    """
    print("\n| format | perplexity | against the reference | KL | same top | bytes | bits |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    some = next(iter(results.values()))
    count = sum(tally.num_tokens for tally in some)
    base = sum(tally.reference_loss for tally in some) / count
    print(f"| the reference, float32 | {math.exp(base):.4f} | | | | | |")
    for name, tallies in results.items():
        loss = sum(tally.loss for tally in tallies) / count
        divergence = sum(tally.divergence for tally in tallies) / count
        same = sum(tally.num_same for tally in tallies) / count
        rise = 100 * math.expm1(loss - base)
        size = ""
        if name in sizes:
            num_bytes, num_weights = sizes[name]
            size = f"{num_bytes:,} | {8 * num_bytes / num_weights:.2f}"
        cells = f"{math.exp(loss):.4f} | {rise:+.2f} % | {divergence:.8f} | {100 * same:.2f} %"
        print(f"| {name} | {cells} | {size or '|'} |")
    print(f"\n{count:,} tokens were scored.")


if __name__ == "__main__":
    main()
