"""Draws the whole engine with the numbers of one real step, and for each chapter the part that it explains.

`python -m docs.guide.draw engine` writes the pictures. A test follows the names in the boxes to their definitions.
"""

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.features.distributed.ring import pack_plan

STEP = 3
"""The step whose numbers the picture shows: two sequences decode, one prompt is finished, and another one begins."""
STORIES = [f"tell me a story about a {animal} and a friend who" for animal in ("fox", "cat", "dog", "owl")]

CHAPTERS = {int(path.name.partition("-")[0]): path.stem for path in Path(__file__).parent.glob("[0-9]*.md")}
"""The name of each chapter's file, by its number. The site makes links to its pages of those in the picture."""

HOST = "#0072b2"
DEVICE = "#b35f00"
LINK = "#4a525d"
WIDTH = 262
HEIGHT = 96
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif\""


@dataclass(frozen=True)
class Part:
    """A box of the picture.

    Attributes:
        title: what it does.
        symbol: the definition that does it: a path from the project's root, "#" and a name.
        chapters: the chapters that explain it.
        column, row: its place.
    """

    title: str
    symbol: str
    chapters: tuple[int, ...]
    column: int
    row: int

    @property
    def on_device(self) -> bool:
        return self.column == 2


PARTS = {
    "prompts": Part("cuts prompts into tokens", "nanovllm/text/prompts.py#tokenise_prompts", (1,), 0, 0),
    "prepare": Part("checks a request", "nanovllm/engine/llm_engine.py#LLMEngine.prepare", (1,), 0, 1),
    "schedule": Part("shares out a step's tokens", "nanovllm/engine/scheduler.py#Scheduler.schedule", (6,), 1, 0),
    "prefix": Part("finds equal beginnings", "nanovllm/engine/block_manager.py#BlockManager.find_prefix", (5,), 1, 1),
    "blocks": Part("hands out blocks", "nanovllm/engine/block_manager.py#BlockManager.take", (4, 5), 1, 2),
    "plan": Part("the step as plain numbers", "nanovllm/engine/plan.py#StepPlan", (6, 8), 1, 3),
    "launch": Part("makes tensors of a plan", "nanovllm/runner/model_runner.py#ModelRunner.launch", (8, 9), 2, 0),
    "layers": Part("the layers", "nanovllm/models/decoder.py#Layer", (0, 2, 3, 10), 2, 1),
    "attention": Part("stores and reads the cache", "nanovllm/models/decoder.py#Attention", (0, 2, 4), 2, 2),
    "logits": Part("scores every next token", "nanovllm/models/decoder.py#Decoder.compute_logits", (0, 2), 2, 3),
    "sample": Part("draws a token a row", "nanovllm/ops/sample.py#sample_reference", (7, 10), 2, 4),
    "result": Part("waits for the device", "nanovllm/runner/step_handle.py#StepHandle.result", (9,), 1, 4),
    "update": Part("appends the tokens", "nanovllm/engine/scheduler.py#Scheduler.update", (1, 10), 0, 3),
    "output": Part("makes text of tokens", "nanovllm/engine/output.py#make_output", (1,), 0, 4),
}
"""The parts, in the order in which a step passes through them."""


class Watch:
    """Notes the numbers of one step; a `StepObserver`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.numbers: dict[str, str] = {}

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        if number == STEP:
            self.numbers |= describe_plan(self._llm, step.plan)

    def finished(self, number: int, step: ScheduledStep, clock: Any, result: StepResult) -> None:
        if number != STEP:
            return
        token_ids = [seq.token_ids[-1] for seq in step.seqs]
        texts = ", ".join(f"“{self._llm.token_text(int(token))}”" for token in token_ids)
        self.numbers["sample"] = f"{len(token_ids)} tokens: {texts}"
        self.numbers["result"] = f"{len(token_ids)} ids: {', '.join(map(str, token_ids))}"
        lengths = ", ".join(str(len(seq.token_ids)) for seq in step.seqs)
        self.numbers["update"] = f"lengths now {lengths}"

    def close(self) -> None:
        pass


def describe_plan(llm: LLM, plan: StepPlan) -> dict[str, str]:
    """Return the numbers of a planned step, by part."""
    scheduler: Any = llm.engine.scheduler
    model: Any = llm.engine.runner.model  # type: ignore[attr-defined]
    pool = scheduler.block_manager
    shares = plan.num_scheduled.tolist()
    hidden = model.norm.numel()
    num_read = int((plan.num_computed + plan.num_scheduled).sum())
    num_logits = int(plan.num_sampled.sum())
    return {
        "schedule": f"{shares} = {plan.num_tokens} tokens, budget {scheduler.max_num_batched_tokens}",
        "prefix": f"{sum(seq.num_cached_tokens or 0 for seq in scheduler.running)} tokens found",
        "blocks": f"{len(plan.block_entries)} new, {pool.num_used} of {pool.num_blocks} used",
        "plan": f"{pack_plan(plan).nbytes} bytes; computed {plan.num_computed.tolist()}",
        "launch": f"{plan.num_tokens} ids, positions and slots",
        "layers": f"{len(model.layers)} times x [{plan.num_tokens}, {hidden}]",
        "attention": f"stores {plan.num_tokens}, reads {num_read} tokens",
        "logits": f"[{num_logits}, {model.embed_tokens.weight.shape[0]}]",
    }


def run_step() -> dict[str, str]:
    """Run four stories, and return the numbers of step STEP, by part."""
    small: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 12, "max_model_len": 192}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM("tiny-qwen3", dtype="float32", max_num_batched_tokens=16, **small) as llm:
        watch = Watch(llm)
        llm.observe(watch)
        outputs = llm.generate(STORIES, params, use_tqdm=False)
        lengths = [len(output["prompt_token_ids"]) for output in outputs]
        steps = llm.stats()["num_steps"]
    first = outputs[0]
    return watch.numbers | {
        "prompts": f"{len(STORIES)} prompts of {lengths} tokens",
        "prepare": f"up to {lengths[0]} + {params.max_tokens} tokens: fits in 192",
        "output": f"after {steps} steps: “{first['text'][:16].strip()} ...”",
    }


def place(part: Part) -> tuple[int, int]:
    return 24 + part.column * (WIDTH + 48), 74 + part.row * (HEIGHT + 30)


def draw_box(part: Part, number: str) -> str:
    x, y = place(part)
    colour = DEVICE if part.on_device else HOST
    name = part.symbol.partition("#")[2]
    word = "chapters " if len(part.chapters) > 1 else "chapter "
    links = ", ".join(f'<a href="{CHAPTERS[chapter]}.md">{chapter}</a>' for chapter in part.chapters)
    lines = [
        f'<a href="{CHAPTERS[part.chapters[0]]}.md">',
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="{colour}" '
        'stroke-width="2"/>',
        f'<text x="{x + 12}" y="{y + 25}" font-size="15" font-weight="600" fill="#16191d">{escape(part.title)}</text>',
        f'<text x="{x + 12}" y="{y + 46}" font-size="13" fill="{colour}">{escape(name)}</text>',
        f'<text x="{x + 12}" y="{y + 67}" font-size="13" fill="#16191d">{escape(number)}</text>',
        "</a>",
        f'<text x="{x + 12}" y="{y + 86}" font-size="12" fill="{LINK}">{word}{links}</text>',
    ]
    return "\n".join(lines)


def draw_arrow(start: Part, end: Part) -> str:
    """Draw a line from box to box: down a column, or from the side of one to the side of the other."""
    x, y = place(start)
    to_x, to_y = place(end)
    if start.column == end.column:
        points = f"{x + WIDTH / 2},{y + HEIGHT} {to_x + WIDTH / 2},{to_y - 3}"
    elif start.column < end.column:
        middle = x + WIDTH + 24
        points = f"{x + WIDTH},{y + 48} {middle},{y + 48} {middle},{to_y + 48} {to_x - 3},{to_y + 48}"
    else:
        middle = x - 24
        points = f"{x},{y + 48} {middle},{y + 48} {middle},{to_y + 48} {to_x + WIDTH + 3},{to_y + 48}"
    return f'<polyline points="{points}" fill="none" stroke="{LINK}" stroke-width="2" marker-end="url(#head)"/>'


def draw_engine(numbers: dict[str, str]) -> str:
    """Return the picture of the whole engine: SVG.

    Args:
        numbers: a line for each of PARTS.
    """
    width = 48 + 3 * WIDTH + 2 * 48
    height = 74 + 5 * (HEIGHT + 30) - 6
    heads = zip(("around the loop", "planning: engine/", "doing: runner/, models/"), (HOST, HOST, DEVICE), strict=True)
    titles = (
        f'<text x="{24 + i * (WIDTH + 48)}" y="54" font-size="16" font-weight="600" fill="{colour}">{title}</text>'
        for i, (title, colour) in enumerate(heads)
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" {FONT}>',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="24" y="24" font-size="14" fill="#16191d">Step {STEP} of a run: four stories, a pool of 12 '
            "blocks of 16 tokens, at most 16 tokens a step</text>",
            *titles,
            *(draw_arrow(start, end) for start, end in pairwise(PARTS.values())),
            *(draw_box(part, numbers[name]) for name, part in PARTS.items()),
            "</svg>\n",
        )
    )


def draw_place(chapter: int) -> str:
    """Return a small map: every part as a box, and those that a chapter explains filled: SVG."""
    names = {"prompts": "tokens", "prepare": "check", "result": "wait", "prefix": "prefixes", "output": "text"}
    box = 108
    width = 8 + 3 * (box + 8)
    height = 8 + 5 * 31 + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name, part in PARTS.items():
        is_here = chapter in part.chapters
        colour = DEVICE if part.on_device else HOST
        x = 8 + part.column * (box + 8)
        y = 8 + part.row * 31
        fill = colour if is_here else "#ffffff"
        ink = "#ffffff" if is_here else LINK
        lines += [
            f'<rect x="{x}" y="{y}" width="{box}" height="25" rx="5" fill="{fill}" stroke="{colour}"/>',
            f'<text x="{x + box / 2}" y="{y + 17}" font-size="13" text-anchor="middle" fill="{ink}">'
            f"{names.get(name, name)}</text>",
        ]
    x = 8
    for colour, words in ((HOST, "plans"), (DEVICE, "computes"), (LINK, "filled: this chapter")):
        lines += [
            f'<rect x="{x}" y="{height - 19}" width="12" height="12" rx="3" fill="{colour}"/>',
            f'<text x="{x + 17}" y="{height - 8}" font-size="13" fill="{LINK}">{words}</text>',
        ]
        x += 70 if colour == HOST else 90
    return "\n".join([*lines, "</svg>\n"])


def write_pictures(folder: Path) -> None:
    """Write engine.svg, and where-N.svg for each chapter N."""
    (folder / "engine.svg").write_text(draw_engine(run_step()), encoding="utf-8")
    for chapter in sorted({chapter for part in PARTS.values() for chapter in part.chapters}):
        (folder / f"where-{chapter}.svg").write_text(draw_place(chapter), encoding="utf-8")
