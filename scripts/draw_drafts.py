"""Draws which drafts of a request were accepted and which were rejected, step by step, from the trace of a run.

python scripts/draw_drafts.py RUN.json -o PICTURE.svg [--request N] [--first N] [--steps N]

Each column is one step. From the bottom up it shows the drafts that were accepted, the token that was sampled after
them, and the drafts that were rejected.
"""

import argparse
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanovllm.apps.view.page import Recording, read_recording

SIZE = 13
GAP = 3
LEFT = 44
TOP = 46
COLORS = {"accepted": "#0072b2", "drawn": "#e69f00", "rejected": "none"}


def find_steps(run: Recording, request: int) -> list[tuple[int, list[str]]]:
    """Return, for each step in which the request decoded, the number of its drafts and the texts of its new tokens."""
    drafts = None
    steps = []
    for kind, _, what in run.records:
        if kind == "plan":
            drafts = dict(what.get("drafts", ())).get(request, 0) if request in what["decode"] else None
        elif kind == "update" and drafts is not None:
            tokens = next((ids for number, *ids in what["tokens"] if number == request), [])
            steps.append((drafts, [run.texts.get(str(i), str(i)) for i in tokens]))
    return steps


def draw(steps: list[tuple[int, list[str]]], title: str) -> str:
    """Return the picture as an SVG document. It shows the text of the token under the pointer."""
    most = max(drafts for drafts, _ in steps) + 1
    width = LEFT + len(steps) * (SIZE + GAP) + 10
    height = TOP + most * (SIZE + GAP) + 22
    bottom = TOP + most * (SIZE + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#6e7781">',
        f'<text x="{LEFT}" y="14">{escape(title)}</text>',
    ]
    for i, (name, color) in enumerate(COLORS.items()):
        x = LEFT + 90 * i
        parts.append(f'<rect x="{x}" y="22" width="11" height="11" fill="{color}" stroke="{_edge(name)}"/>')
        parts.append(f'<text x="{x + 16}" y="32">{name}</text>')
    for count in range(1, most + 1, 2):
        parts.append(f'<text x="{LEFT - 8}" y="{bottom - count * (SIZE + GAP) + 11}" text-anchor="end">{count}</text>')
    for i, (drafts, texts) in enumerate(steps):
        accepted = len(texts) - 1
        kinds = ["accepted"] * accepted + ["drawn"] + ["rejected"] * (drafts - accepted)
        for level, kind in enumerate(kinds, 1):
            x = LEFT + i * (SIZE + GAP)
            y = bottom - level * (SIZE + GAP)
            text = f"<title>{escape(repr(texts[level - 1]))}</title>" if level <= len(texts) else ""
            parts.append(
                f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" fill="{COLORS[kind]}" stroke="{_edge(kind)}">'
                f"{text}</rect>"
            )
        if i % 10 == 0:
            parts.append(f'<text x="{LEFT + i * (SIZE + GAP)}" y="{bottom + 14}">{i + 1}</text>')
    parts.append(f'<text x="{width - 10}" y="{bottom + 14}" text-anchor="end">steps</text></svg>')
    return "\n".join(parts) + "\n"


def _edge(kind: str) -> str:
    return "#c0392b" if kind == "rejected" else COLORS[kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the recording of a run, JSON")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture to write, SVG")
    parser.add_argument("--request", type=int, default=0, metavar="N", help="the request's number, counted from 0")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out the first N steps")
    parser.add_argument("--steps", type=int, default=56, metavar="N", help="draw at most N steps")
    args = parser.parse_args()
    steps = find_steps(read_recording(args.trace), args.request)[args.first :][: args.steps]
    num_tokens = sum(len(texts) for _, texts in steps)
    args.output.write_text(draw(steps, f"{num_tokens} tokens in {len(steps)} steps"), encoding="utf-8")
    print(f"{args.output}: {num_tokens} tokens in {len(steps)} steps, {sum(drafts for drafts, _ in steps)} drafts")


if __name__ == "__main__":
    main()
