"""Draws the README's picture of speed, docs/speed.svg, from the first table of a section of docs/benchmarks.md.

python scripts/draw_speed.py [-o PICTURE.svg]

Each row is an engine, and each column a workload. Within a column the length of a bar is proportional to its number.
The bars of this engine are blue.
"""

import argparse
import re
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "speed.svg"
HEADING = "With AMX, beside quantised rivals"
MACHINE = "Two cores of an Intel Xeon with AMX. The shape of Qwen3-0.6B, random weights"
LEFT = 180
TOP = 60
ROW = 21
COLUMN = 170
LONGEST = 110


class Table(NamedTuple):
    """Holds the table that is drawn."""

    commit: str
    workloads: list[str]
    rows: dict[str, list[str]]
    """Maps the name of each engine to its numbers, one for each workload, as the page writes them."""


def read_table(page: str, heading: str) -> Table:
    """Return the first table under a heading of a page.

    A cell's number is the first word of the cell. The name of an engine ends at the first colon of its cell.

    Raises:
        ValueError: The page has no such heading, or its section names no commit or has no table.
    """
    _, found, section = page.partition(f"\n## {heading}\n")
    commit = re.search(r"\bcommit (\w{7})\b", section, re.IGNORECASE)
    table = re.search(r"^\|.*\n\| --- .*\n((?:\|.*\n)+)", section, re.MULTILINE)
    if not found or commit is None or table is None:
        raise ValueError(f'the page has no section "{heading}" with a commit and a table')
    head, _, *body = [line.strip("|").split("|") for line in table[0].replace("**", "").splitlines()]
    rows = {name.partition(":")[0].strip(): [cell.split()[0] for cell in cells] for name, *cells in body}
    return Table(commit[1], [cell.strip() for cell in head[1:]], rows)


def draw(table: Table) -> str:
    """Return the picture as an SVG document."""
    width = LEFT + COLUMN * len(table.workloads)
    height = TOP + ROW * len(table.rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="13">Tokens a second. {escape(MACHINE)}. Commit {table.commit}.</text>',
    ]
    for row, name in enumerate(table.rows):
        y = TOP + ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end"{_weight(name)}>{escape(name)}</text>')
    for column, workload in enumerate(table.workloads):
        x = LEFT + COLUMN * column
        parts.append(f'<text x="{x}" y="{TOP - 12}" fill="#57606a">{escape(workload)}</text>')
        most = max(float(numbers[column]) for numbers in table.rows.values())
        for row, (name, numbers) in enumerate(table.rows.items()):
            y = TOP + ROW * row
            length = LONGEST * float(numbers[column]) / most
            color = "#0072b2" if _is_ours(name) else "#b6bdc5"
            parts.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{ROW - 5}" fill="{color}"/>')
            parts.append(f'<text x="{x + length + 5:.1f}" y="{y + 13}"{_weight(name)}>{numbers[column]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def _weight(name: str) -> str:
    return ' font-weight="bold"' if _is_ours(name) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-o", "--output", type=Path, default=PICTURE, help="the picture to write (default: %(default)s)"
    )
    output = parser.parse_args().output
    output.write_text(draw(read_table(PAGE.read_text(encoding="utf-8"), HEADING)), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
