"""Draws the guide's pictures. Each shows a run that is made now: python -m docs.guide.draw [-o FOLDER] [NAME ...]

The window's picture needs Chromium with its driver, and selenium.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from docs.guide import big_picture
from docs.guide import from_nothing as engine
from docs.guide.big_picture import STORIES
from docs.guide.exercises import replay, tell_story
from nanovllm import LLM, SamplingParams
from nanovllm.apps.view.page import Recording, read_recording, write_page
from nanovllm.features.distributed.ring import pack_plan
from nanovllm.ops.sample import uniform_reference

DECODE = "#0072b2"
PREFILL = "#e69f00"
CACHED = "#009e73"
WAITING = "#8a929c"
ALERT = "#c0392b"
OWNERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a800", "#7570b3")
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
TINY: dict[str, Any] = {"dtype": "float32", "kvcache_block_size": 16, "max_model_len": 192}


def record(prompts: list[str], params: SamplingParams, chat: bool = False, **options: Any) -> Recording:
    """Run the built-in model, and return the trace of the run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        with LLM("tiny-qwen3", trace=str(path), **{**TINY, **options}) as llm:
            if chat:
                llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=False)
            else:
                llm.generate(prompts, params, use_tqdm=False)
        return read_recording(path)


def panels(rows: int, height: float) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(rows, 1, figsize=(9, height), layout="constrained", squeeze=False)
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[:, 0])


def ink(color: Any) -> str:
    """Return the colour of text on a colour, white or black: the one with more contrast (WCAG 2's formula)."""
    red, green, blue = (part**2.2 for part in to_rgb(color))
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18 else "black"


def draw_tokens(axis: Axes, run: Recording) -> None:
    steps = np.arange(1, run.num_steps + 1)
    decode = np.array(run.charts["decode"])
    prefill = np.array(run.charts["prefill"])
    axis.bar(steps, decode, color=DECODE, label="decode")
    axis.bar(steps, prefill, bottom=decode, color=PREFILL, hatch="//", edgecolor="white", lw=0, label="prefill")
    axis.set_ylabel("tokens of a step")


def from_nothing() -> Figure:
    """Draw one pass of chapter 0's engine: the numbers of every token, row by row, in its first layer."""
    token_ids = engine.TOKENIZER.encode("tell me a story about a").ids
    words = [visible(engine.TOKENIZER.decode([i])) for i in token_ids]
    parts, attention = trace_first_layer(token_ids)
    logits = engine.forward(token_ids, {})
    figure = plt.figure(figsize=(9, 12), layout="constrained")
    rows = figure.subfigures(len(parts) + 2, 1, height_ratios=[1.2, 1.2, 1.5, 1.2, 1.2, 1.2, 1.2, 1.4])
    strips = [*rows[:2], *rows[3:-1]]
    for row, panels_of_row in zip(strips, parts, strict=True):
        axes = row.subplots(1, len(panels_of_row), width_ratios=[max(p.shape[1], 110) for _, p in panels_of_row])
        for axis, (title, values) in zip(np.atleast_1d(axes), panels_of_row, strict=True):
            draw_numbers(axis, title, values, words)
    heads = rows[2].subplots(1, len(attention))
    for head, (axis, shares) in enumerate(zip(heads, attention, strict=True)):
        axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks([])
        axis.set_yticks(range(len(words)) if head == 0 else [], words if head == 0 else [], fontsize=9)
        axis.set_title(f"head {head}: {float(shares[-1].max()):.2f}", fontsize=9)
    rows[2].suptitle("attention [8, 6, 6]: how much a token (row) attends to each other (column)", fontsize=9)
    likely = logits.softmax(-1).topk(10)
    axis = rows[-1].subplots()
    axis.bar(range(10), likely.values, color=DECODE)
    axis.set_xticks(range(10), [visible(engine.TOKENIZER.decode([int(i)])) for i in likely.indices])
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"logits [{len(logits)}] of the last token; softmax gives the probability of the next", fontsize=9)
    return figure


def trace_first_layer(token_ids: list[int]) -> tuple[list[list[tuple[str, torch.Tensor]]], torch.Tensor]:
    """Return rows of (title, values [n, width]) of the first layer and the last; and the attention [8, n, n]."""
    name = "model.layers.0"
    positions = torch.arange(len(token_ids))
    embedded = engine.WEIGHTS["model.embed_tokens.weight"][token_ids]
    normed = engine.norm(embedded, name + ".input_layernorm")
    queries, keys, values = engine.make_heads(normed, name + ".self_attn", positions)
    after_attention = embedded + engine.attend(normed, name + ".self_attn", positions, {})
    middle = engine.norm(after_attention, name + ".post_attention_layernorm")
    gate = engine.project(middle, name + ".mlp.gate_proj")
    gated = torch.nn.functional.silu(gate) * engine.project(middle, name + ".mlp.up_proj")
    x = embedded
    after_layers = []
    for i in range(engine.NUM_LAYERS):
        name = f"model.layers.{i}"
        x = x + engine.attend(engine.norm(x, name + ".input_layernorm"), name + ".self_attn", positions, {})
        x = x + engine.think(engine.norm(x, name + ".post_attention_layernorm"), name + ".mlp")
        after_layers.append(x)
    parts = [
        [("x: the embeddings", embedded)],
        [("queries, 8 heads", queries.flatten(1)), ("keys, 2 heads", keys.flatten(1)), ("values", values.flatten(1))],
        [("x + attention", after_attention)],
        [("inside the MLP: silu(gate) * up", gated)],
        [("x + MLP: after layer 1", after_layers[0])],
        [(f"x after layer {len(after_layers)}", after_layers[-1])],
    ]
    return parts, engine.compare(queries, keys, positions)


def draw_numbers(axis: Axes, title: str, values: torch.Tensor, words: list[str]) -> None:
    """Draw values [n, width] as colours, blue below zero and red above; name a few of the last token's."""
    bound = float(values.abs().quantile(0.99))
    axis.imshow(values, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(words)), words, fontsize=9)
    axis.set_xticks([])
    few = ", ".join(f"{value:.2f}" for value in values[-1, :2].tolist())
    axis.set_title(f"{title} [{len(values)}, {values.shape[1]}]", fontsize=9)
    axis.set_xlabel(f"last row: {few} ...", fontsize=9, labelpad=1)


def prompt() -> Figure:
    run = record(["what is the capital of Japan?"], SamplingParams(temperature=0), chat=True)
    figure, (tokens, times) = panels(2, 4.2)
    draw_tokens(tokens, run)
    tokens.legend(frameon=False)
    sampled = [what["tokens"][0][-1] for kind, _, what in run.records if kind == "update"]
    for step, token in enumerate(sampled, 1):
        height = run.charts["decode"][step - 1] + run.charts["prefill"][step - 1]
        text = run.texts[str(token)].replace(" ", "␣")
        tokens.text(step, height + 0.4, text if len(text) < 9 else "end", ha="center", fontsize=9)
    tokens.set_title("what each step computes, and (above it) the token that it gives", fontsize=10)
    device = [ms or 0.0 for ms in run.device_time]
    times.bar(np.arange(1, run.num_steps + 1), device, color=DECODE)
    times.set_ylabel("ms of the device")
    times.set_xlabel("step")
    return figure


def transformer() -> Figure:
    """Draw the logit lens: the likeliest next token after each layer, at each of the last places of a prompt."""
    with LLM("tiny-qwen3", **TINY) as llm:
        model: Any = llm.engine.runner.model  # type: ignore[attr-defined]
        said: list[tuple[list[int], list[float]]] = []

        def listen(_: Any, __: Any, outputs: Any) -> None:
            hidden = model.backend.add_rms_norm(*outputs, model.norm, model.eps)[0]
            chances, tokens = model.compute_logits(hidden).softmax(-1).max(-1)
            said.append((tokens.tolist(), chances.tolist()))

        for layer in model.layers:
            layer.register_forward_hook(listen)
        question = [{"role": "user", "content": "what is 3 plus 4?"}]
        output = llm.chat(question, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
        prompt = [llm.token_text(i) for i in output["prompt_token_ids"]]
        words = [[llm.token_text(i) for i in tokens] for tokens, _ in said]
    places = range(4, len(prompt))
    figure, (axis,) = panels(1, 4)
    chances = np.array([chances for _, chances in said])[:, 4:]
    image = axis.imshow(chances, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for depth, row in enumerate(words):
        for x, place in enumerate(places):
            color = ink(image.cmap(chances[depth, x]))
            axis.text(x, depth, visible(row[place]), ha="center", va="center", color=color, fontsize=9)
    axis.set_xticks(range(len(places)), [visible(prompt[place]) for place in places], fontsize=9)
    axis.set_yticks(range(len(words)), [f"after layer {i + 1}" for i in range(len(words))])
    axis.set_xlabel("the prompt's token at this place")
    figure.colorbar(image, label="probability of the likeliest next token")
    return figure


def visible(text: str) -> str:
    short = {"<|im_start|>": "<start>", "<|im_end|>": "<end>", "\n": "\\n", "assistant": "assist."}
    return short.get(text, text.replace(" ", "␣"))


def memory(num_layers: int = 28, num_rounds: int = 15) -> Figure:
    """Draw how long the MLPs of Qwen3-0.6B's 28 layers take. Their 1 GB of weights fits into no processor's cache.

    It measures the CPU time of one thread, which other processes disturb least.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layers = [(torch.randn(6144, 1024), torch.randn(1024, 3072)) for _ in range(num_layers)]
    counts = (1, 2, 4, 8, 16, 32)
    measured = dict.fromkeys(counts, float("inf"))
    with torch.inference_mode():
        for _, n in itertools.product(range(num_rounds), counts):  # in turn: a disturbance then hits all counts
            x = torch.randn(n, 1024)
            since = time.process_time()
            for gate_up, down in layers:
                gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
                torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
            measured[n] = min(measured[n], time.process_time() - since)
    torch.set_num_threads(threads)
    figure, (times, rates) = panels(2, 5)
    places = np.arange(len(counts))
    times.bar(places, [1e3 * measured[n] for n in counts], color=DECODE)
    times.set_ylabel("ms a step")
    rates.plot(places, [n / measured[n] for n in counts], "o-", color=DECODE)
    rates.set_ylabel("tokens a second")
    rates.set_xlabel("tokens in a step (the MLPs of Qwen3-0.6B, float32, one CPU thread)")
    for axis in (times, rates):
        axis.set_xticks(places, [str(n) for n in counts])
        axis.set_ylim(bottom=0)
    return figure


class Watch:
    """Keeps each step's CPU time, and the size of its plan; a `StepObserver`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.plans: list[tuple[int, int]] = []

    def planned(self, number: int, at: float, step: Any) -> None:
        self._since = time.process_time()
        self.plans.append((pack_plan(step.plan).nbytes, step.plan.num_tokens))

    def finished(self, *_: object) -> None:
        self.seconds.append(time.process_time() - self._since)

    def close(self) -> None:
        pass


def find_owners(run: Recording) -> np.ndarray:
    """Return which request owns each block in each step, int [num_blocks, num_steps]; -1 if none does."""
    grid = np.full((run.num_blocks, run.num_steps), -1)
    tables: dict[int, list[int]] = {}
    for kind, step, what in run.records:
        for request in what.get("preempted", []):
            tables.pop(request, None)
        for request, _ in what.get("ended", []):
            tables.pop(request, None)
        for request, blocks in what.get("tables", []):
            tables.setdefault(request, []).extend(blocks)
        if kind == "plan":
            for request, blocks in tables.items():
                grid[blocks, step] = request
    return grid


def draw_owners(axis: Axes, run: Recording) -> None:
    grid = find_owners(run)
    axis.set_facecolor("#f1f3f5")
    for block, row in enumerate(grid):
        for request in sorted(set(row.tolist()) - {-1}):
            steps = np.flatnonzero(row == request)
            for part in np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1):
                start = part[0] + 0.5
                width = len(part)
                color = OWNERS[request % len(OWNERS)]
                axis.broken_barh([(start, width)], (block - 0.42, 0.84), color=color)
                axis.text(start + 0.6, block, str(request), va="center", fontsize=9, color=ink(color))
    axis.set_ylim(run.num_blocks - 0.4, -0.6)
    axis.set_xlim(0.5, run.num_steps + 0.5)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel("block")


def kv_cache() -> Figure:
    prompts = ["1 2 3", "tell me a story about a fox who had no friends", "count from 1 to 9", *STORIES[:3]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (50, 20, 35, 30, 25, 40)]
    run = record(prompts, params, num_kvcache_blocks=14, max_num_seqs=4)  # type: ignore[arg-type]
    figure, (axis,) = panels(1, 4)
    draw_owners(axis, run)
    axis.set_xlabel("step (the number in a bar is its owner's)")
    return figure


def prefixes() -> Figure:
    rules = (
        "You are a helpful assistant. Answer in one short sentence, be kind, and never make up what you do not know. "
    )
    prompts = [rules + f"what is {i} plus {2 * i % 7}?" for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=12)
    run = record(prompts, params, chat=True, max_num_batched_tokens=256, order="given")
    cached: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for _, _, what in run.records:
        lengths |= dict(what.get("arrived", []))
        cached = dict(what.get("moved_in", [])) | cached
    figure, (axis,) = panels(1, 3.2)
    requests = np.array(sorted(lengths))
    found = np.array([cached[i] for i in requests])
    whole = np.array([lengths[i] for i in requests])
    axis.bar(requests, found, color=CACHED, label="found in the cache")
    axis.bar(
        requests, whole - found, bottom=found, color=PREFILL, hatch="//", edgecolor="white", lw=0, label="computed"
    )
    axis.set_xlabel("request, in order of admission")
    axis.set_ylabel("tokens of its prompt")
    axis.set_ylim(top=1.25 * whole.max())
    axis.legend(frameon=False, ncols=2)
    return figure


def scheduler() -> Figure:
    run = record(STORIES, LONG, num_kvcache_blocks=12, max_num_batched_tokens=16)
    figure, (tokens, blocks, lives) = panels(3, 7)
    draw_tokens(tokens, run)
    tokens.axhline(run.budget, color=ALERT, ls="--", lw=1, label="the budget")
    tokens.legend(frameon=False, ncols=3, loc="center", bbox_to_anchor=(0.36, 0.65))
    draw_owners(blocks, run)
    draw_lives(lives, run)
    for axis in (tokens, blocks, lives):
        axis.set_xlim(0.5, run.num_steps + 0.5)
    lives.set_xlabel("step")
    return figure


def draw_lives(axis: Axes, run: Recording) -> None:
    """Draw for each request when it waits, computes its prompt, and decodes."""
    since: dict[int, int] = {}
    decodes: dict[int, tuple[int, int]] = {}
    """For each request, its current run of decode steps: (first step, how many)."""

    def bar(request: int, first: int, count: int, height: float, color: str) -> None:
        axis.broken_barh([(first + 0.5, count)], (request - height / 2, height), color=color)

    for kind, step, what in run.records:
        if kind != "plan":
            continue
        for request, _ in what.get("arrived", []):
            since[request] = step
        for request in what.get("preempted", []):
            since[request] = step
            axis.plot(step + 0.5, request, "D", color=ALERT, ms=6, zorder=3)
        for request, _ in what.get("moved_in", []):
            bar(request, since[request], step - since[request], 0.08, WAITING)
        for request, _, _ in what.get("prefill", []):
            bar(request, step, 1, 0.8, PREFILL)
        for request in what.get("decode", []):
            first, count = decodes.get(request, (step, 0))
            if first + count != step:
                bar(request, first, count, 0.4, DECODE)
                first = step
                count = 0
            decodes[request] = (first, count + 1)
    for request, (first, count) in decodes.items():
        bar(request, first, count, 0.4, DECODE)
    axis.set_yticks(range(len(since)))
    axis.set_ylabel("request")
    axis.invert_yaxis()
    for label, color in (("waits", WAITING), ("prefill", PREFILL), ("decodes", DECODE)):
        axis.plot([], [], color=color, lw=5, label=label)
    axis.plot([], [], "D", color=ALERT, label="is preempted")
    axis.legend(frameon=False, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.18))


def sampling() -> Figure:
    with LLM("tiny-qwen3", **TINY) as llm:
        params = SamplingParams(temperature=1, seed=0, max_tokens=1, logprobs=664)
        output = llm.generate("tell me a story about", params, use_tqdm=False)[0]
        likely = sorted(output["logprobs"][0].items(), key=lambda pair: -pair[1])
        names = {token: visible(llm.token_text(token)) for token, _ in likely[:40]}
    figure, (bars, strip) = panels(2, 4.4)
    top = likely[:12]
    bars.bar(range(len(top)), np.exp([logprob for _, logprob in top]), color=DECODE)
    bars.set_xticks(range(len(top)), [names[token] for token, _ in top])
    bars.set_ylabel("probability")
    edge = 0.0
    for i, (token, logprob) in enumerate(sorted(likely)):
        width = float(np.exp(logprob))
        color = OWNERS[i % len(OWNERS)]
        strip.broken_barh([(edge, width)], (0, 1), color=color)
        if width > 0.03:
            strip.text(edge + width / 2, 0.5, names[token], ha="center", va="center", color=ink(color), fontsize=9)
        edge += width
    position = torch.tensor([len(output["prompt_token_ids"])])
    for seed in range(5):
        u = float(uniform_reference(torch.tensor([seed]), position))
        strip.annotate(
            f"seed {seed}", (u * edge, 1), (u * edge, 1.5), ha="center", arrowprops={"arrowstyle": "->"}, fontsize=9
        )
    strip.set_ylim(0, 2)
    strip.set_yticks([])
    strip.set_xlim(0, 1)
    strip.set_xlabel("the tokens above, side by side in order of their ids; u of five seeds at this position")
    return figure


def devices() -> Figure:
    with LLM("tiny-qwen3", tensor_parallel_size=2, max_num_batched_tokens=64, **TINY) as llm:
        watch = Watch()
        llm.observe(watch)
        llm.generate(STORIES * 3, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
        model: Any = llm.engine.runner.local.model  # type: ignore[attr-defined]
        a_token = 2 * len(model.layers) * model.norm.numel() * 4
    figure, (axis,) = panels(1, 3.2)
    steps = range(1, len(watch.plans) + 1)
    axis.plot(
        steps, [tokens * a_token for _, tokens in watch.plans], "o-", ms=4, color=PREFILL, label="the layers' sums"
    )
    axis.plot(steps, [size for size, _ in watch.plans], "s-", ms=4, color=DECODE, label="the plan")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")  # 100 and not 10², whose 2 is too small
    axis.set_ylabel("bytes")
    axis.set_xlabel("step")
    axis.legend(frameon=False)
    return figure


def speed() -> Figure:
    run = record([f"count from {i} to 20" for i in range(32)], LONG, max_num_seqs=16)
    figure, (axis,) = panels(1, 3.4)
    steps = np.arange(1, run.num_steps + 1)
    for times, color, mark, label in (
        (run.device_time, DECODE, "s", "device: the model and the sampling"),
        (run.host, ALERT, "x", "host: schedule, prepare, launch, update"),
    ):
        axis.plot(steps, np.array(times, float), mark, ms=4, color=color, label=label)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")  # 100 and not 10², whose 2 is too small
    axis.set_ylabel("ms a step")
    axis.set_xlabel("step")
    axis.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    return figure


def guess_and_round() -> Figure:
    """Draw the tokens of each step with drafts, and a row of weights as it is rounded."""
    prompt, output = tell_story()
    passes = np.array(list(replay(prompt + output + prompt, output, 4)))
    with LLM("tiny-qwen3", **TINY) as llm:
        row = llm.engine.runner.model.layers[0].mlp.down_proj.weight[0, :32].detach()  # type: ignore[attr-defined]
    figure, (tokens, values) = panels(2, 5.6)
    steps = np.arange(1, len(passes) + 1)
    tokens.bar(steps, passes, color=CACHED, label="right drafts")
    tokens.bar(steps, 1, bottom=passes, color=DECODE, label="the token that is drawn anyway")
    tokens.set_ylabel("tokens of a pass")
    tokens.set_xlabel("pass (the same story for the second time)")
    tokens.set_ylim(top=6.5)
    tokens.legend(frameon=False, ncols=2)
    places = np.arange(32)
    for levels, color, mark in ((127, DECODE, "o"), (7, ALERT, "x")):
        scale = float(row.abs().max()) / levels
        values.plot(places, (row / scale).round() * scale, mark, color=color, label=f"{2 * levels + 1} levels")
    values.bar(places, row, color="#c9ced6", label="the weights")
    values.set_xlabel("32 weights of a row, with one scale")
    values.legend(frameon=False, ncols=3)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "0-from-nothing": from_nothing,
    "1-prompt": prompt,
    "2-transformer": transformer,
    "3-memory": memory,
    "4-kv-cache": kv_cache,
    "5-prefixes": prefixes,
    "6-scheduler": scheduler,
    "7-sampling": sampling,
    "8-devices": devices,
    "9-speed": speed,
    "10-guess-and-round": guess_and_round,
}


def record_logits(path: Path) -> None:
    """Write [text, log-probability] of every token after chapter 7's prompt, the likeliest first: for the site."""
    params = SamplingParams(temperature=1, max_tokens=1, logprobs=664)
    with LLM("tiny-qwen3", **TINY) as llm:
        (output,) = llm.generate(["tell me a story about"], params, use_tqdm=False)
        found = sorted(output["logprobs"][0].items(), key=lambda pair: -pair[1])
        rows = [[llm.token_text(token), round(logprob, 3)] for token, logprob in found]
    path.write_text(json.dumps(rows), encoding="utf-8")


def record_demo(trace: Path) -> None:
    """Record the run that the window's picture and the site's demo show: 48 chats, and too small a cache."""
    rules = {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence, and be kind. "}
    tasks = ("what is {0} plus 3?", "count from {0} to 20", "tell me a story about a fox and {0} friends")
    chats = [[rules, {"role": "user", "content": tasks[i % 3].format(i % 9)}] for i in range(48)]
    options = {**TINY, "num_kvcache_blocks": 60, "max_num_batched_tokens": 96, "max_num_seqs": 20}
    with LLM("tiny-qwen3", trace=str(trace), **options) as llm:
        llm.chat(chats, SamplingParams(temperature=0.7, max_tokens=80), use_tqdm=False)


def photograph(output: Path) -> None:
    """Take a picture of the window of demo.json, which stands behind it on the site, in headless Chromium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        run = write_page(output / "demo.json", page)
        victim, step = next((what["preempted"][0], k) for _, k, what in run.records if "preempted" in what)
        chromium = webdriver.ChromeOptions()
        for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", "window-size=1060,1350"):
            chromium.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options=chromium, service=Service(shutil.which("chromedriver")))
        try:
            driver.get(f"file://{page}")
            driver.execute_script("visit(TOUR.length); choose(arguments[0]); go(arguments[1])", victim, step - 3)
            time.sleep(0.5)
            driver.save_screenshot(str(output / "window.png"))
        finally:
            driver.quit()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent, metavar="FOLDER")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join((*PICTURES, 'engine', 'window', 'demo', 'logits'))} (default: all but the last two)",
    )
    options = parser.parse_args(arguments)
    plt.rcParams |= {"svg.hashsalt": "nanovllm", "font.size": 10, "svg.fonttype": "path"}
    for name in options.names or (*PICTURES, "engine", "window"):
        if name == "window":
            photograph(options.output)
            continue
        if name == "demo":
            record_demo(options.output / "demo.json")
            continue
        if name == "logits":
            record_logits(options.output / "logits.json")
            continue
        if name == "engine":
            big_picture.write_pictures(options.output)
            continue
        figure = PICTURES[name]()
        figure.savefig(options.output / f"{name}.svg", metadata={"Date": None}, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    main()
