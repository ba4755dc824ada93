"""Makes the front page's picture: a run in small, from the recording that stands behind the demo.

The page has one step of it as a still picture. `moveRun` of site.js shows the other steps.
"""

import json
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from nanovllm.apps.view.page import Recording, read_recording

RECORDING = Path(__file__).parent / "guide" / "demo.json"
STILL = 60
"""The step of the still picture: blocks are shared, and some answers are long."""
NUM_COLOURS = 8
"""Requests take colours in turn. site.css has them."""
NUM_ANSWERS = 5
"""So many answers are shown at a time."""
QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


@dataclass
class Frame:
    """Holds what the engine has when a step has been planned.

    Attributes:
        blocks: a letter for each KV block. A digit is the colour of its only owner; "s": several requests share it;
            "c": it has none, and its content can be found again; "b": it is blank.
        answers: the requests whose answers are shown, each in a place of its own; None: nobody is there.
    """

    blocks: str
    answers: list[int | None]


@dataclass
class Replay:
    """Follows the records of a run.

    Attributes:
        tables: the blocks of each running request.
        findable: the blocks whose content can be found by its hash.
        token_ids: the tokens of each request with the steps before which they were known, the prompt's first.
        num_prompt: how many tokens the prompt of each request has.
    """

    run: Recording
    tables: dict[int, list[int]] = field(default_factory=dict)
    findable: set[int] = field(default_factory=set)
    tokens: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    num_prompt: dict[int, int] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kind, step, what in self.run.records:
            self._apply(what)
            next_step = step if kind == "plan" else step + 1
            for number, *token_ids in what.get("tokens", ()):
                self.tokens.setdefault(number, []).extend((next_step, token) for token in token_ids)
            if kind == "plan":
                self.frames.append(self._take_frame())

    def _apply(self, what: dict[str, Any]) -> None:
        self.num_prompt |= dict(what.get("arrived", ()))
        for verb, blocks in what.get("blocks", ()):
            if verb == "register":
                self.findable.update(blocks)
            elif verb in ("take", "forget"):
                self.findable.difference_update(blocks)
        for number in what.get("preempted", ()):
            del self.tables[number]
        for number, _ in what.get("ended", ()):
            self.tables.pop(number, None)
        for number, blocks in what.get("tables", ()):
            self.tables.setdefault(number, []).extend(blocks)

    def _take_frame(self) -> Frame:
        letters = ["c" if block in self.findable else "b" for block in range(self.run.num_blocks)]
        for number, blocks in self.tables.items():
            for block in blocks:
                letters[block] = "s" if letters[block] not in "cb" else str(number % NUM_COLOURS)
        before = self.frames[-1].answers if self.frames else [None] * NUM_ANSWERS
        answers = [number if number in self.tables else None for number in before]
        others = iter(sorted(self.tables.keys() - set(answers)))
        return Frame("".join(letters), [next(others, None) if number is None else number for number in answers])

    def list_answers(self) -> dict[int, dict[str, Any]]:
        """Return the question of each request that is shown, and the texts of its answer with their steps."""
        shown = {number for frame in self.frames for number in frame.answers if number is not None}
        return {number: self._read_answer(number) for number in sorted(shown)}

    def _read_answer(self, number: int) -> dict[str, Any]:
        texts = [(step, self.run.texts[str(token)]) for step, token in self.tokens[number]]
        prompt = "".join(text for _, text in texts[: self.num_prompt[number]])
        (question,) = QUESTION.findall(prompt)
        answer = [[step, text] for step, text in texts[self.num_prompt[number] :] if text != "<|im_end|>"]
        return {"question": question, "answer": answer}


def render_motion(demo: str) -> str:
    """Return the picture as HTML, with the data of its motion.

    Args:
        demo: the address of the demo, which shows the same run.
    """
    replay = Replay(read_recording(RECORDING))
    run = replay.run
    answers = replay.list_answers()
    frame = replay.frames[STILL]
    columns = "".join(draw_column(step, run) for step in range(run.num_steps))
    cells = "".join(f'<i data-block="{letter}"></i>' for letter in frame.blocks)
    rows = "".join(render_answer(number, answers) for number in frame.answers)
    captions = [describe_step(step, run) for step in range(run.num_steps)]
    data = {
        "still": STILL,
        "colours": NUM_COLOURS,
        "captions": captions,
        "frames": [vars(frame) for frame in replay.frames],
        "answers": answers,
    }
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<figure class="motion" id="motion">
<div role="img" aria-label="{len(replay.num_prompt)} chats: tokens of each step, blocks of the KV cache, and answers">
<svg viewBox="0 0 {run.num_steps} {run.budget}" preserveAspectRatio="none">{columns}
<rect class="later" x="{STILL + 1}" width="{run.num_steps}" height="{run.budget}"/></svg>
<div class="blocks">{cells}</div>
<ol>{rows}</ol>
</div>
<figcaption><button type="button" hidden>Play</button>
<span class="step">{captions[STILL]}</span> <a href="{demo}">Look into this run</a><br>
Above, the tokens of each step: of prompts in orange, of answers in blue. A square is a block of the KV cache. It has
the colour of its chat; dark blue ones hold the beginning that the chats share.</figcaption>
<script type="application/json">{script}</script>
</figure>"""


def draw_column(step: int, run: Recording) -> str:
    """Return the bars of a step: tokens of decodes, and of prompts above them."""
    bars = ""
    top = run.budget
    for kind in ("decode", "prefill"):
        height = run.charts[kind][step]
        top -= height
        bars += f'<rect class="{kind}" x="{step + 0.1}" y="{top}" width="0.8" height="{height}"/>' if height else ""
    return bars


def render_answer(number: int | None, answers: dict[int, dict[str, Any]]) -> str:
    """Return a place with the question and the answer so far of a request, or with nothing."""
    if number is None:
        return '<li data-block="b"><b></b><p><span></span></p></li>'
    question = escape(answers[number]["question"])
    answer = escape("".join(text for step, text in answers[number]["answer"] if step <= STILL))
    return f'<li data-block="{number % NUM_COLOURS}"><b>{question}</b><p><span>{answer}</span></p></li>'


def describe_step(step: int, run: Recording) -> str:
    """Return the numbers of a step in words."""
    running, waiting, used = (run.charts[name][step] for name in ("running", "waiting", "used"))
    chats = f"{running} chats run, {waiting} wait"
    return f"Step {step + 1} of {run.num_steps}: {chats}, {used} of {run.num_blocks} blocks are used."
