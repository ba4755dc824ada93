"""Writes each chapter of the guide as a notebook: python docs/guide/notebooks.py [-o FOLDER]

A notebook has the chapter's words, its experiments, what they print, and its pictures. Its first cell installs the
project.
"""

import argparse
import base64
import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parent
CHAPTERS = sorted(GUIDE.glob("[0-9]*-*.md"), key=lambda chapter: int(chapter.name.partition("-")[0]))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```\n", re.M | re.S)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([\w-]+\.(?:svg|png))\)")
FOLDER = Path(tempfile.gettempdir()) / "nanovllm-guide"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|attachment:)[^)]*\)")
"""A link to a file of the repository. A notebook may lie anywhere, so it keeps the words alone."""
INSTALL = """\
# Installs the project. If this notebook lies outside a clone of the repository, write the repository's address here.
REPOSITORY = ""
if REPOSITORY:
    !git clone --depth 1 {REPOSITORY} nano-vllm
    %cd nano-vllm
%pip install -q -e .
"""
"""The first cell."""
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass
class Experiment:
    """A block of a chapter.

    Attributes:
        code: what the reader pastes, with the empty line that ends it where it needs one.
        printed: the lines that the chapter says it prints.
        start, end: its place in the chapter's text, with its printed lines.
    """

    code: str
    start: int
    end: int
    printed: list[str] = field(default_factory=list)


def find_experiments(text: str) -> list[Experiment]:
    """Return the experiments of a chapter in order.

    Raises:
        ValueError: a block of printed lines follows no block of code.
    """
    experiments: list[Experiment] = []
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        if language == "python":
            experiments.append(Experiment(body, block.start(), block.end()))
        elif not experiments or experiments[-1].printed:
            raise ValueError(f"no code prints this block: {body}")
        else:
            experiments[-1].printed = body.splitlines()
            experiments[-1].end = block.end()
    return experiments


def make_notebook(chapter: Path) -> dict[str, Any]:
    """Return a chapter as a notebook of format 4.5."""
    text = chapter.read_text(encoding="utf-8")
    cells: list[dict[str, Any]] = []
    at = 0
    add_code(cells, Experiment(INSTALL, 0, 0))
    for experiment in find_experiments(text):
        add_words(cells, text[at : experiment.start])
        add_code(cells, experiment)
        at = experiment.end
    add_words(cells, text[at:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def add_words(cells: list[dict[str, Any]], words: str) -> None:
    """Append a cell of text, if there is any. It carries its pictures, so that the notebook may be moved."""
    words = LINK.sub(r"\1", words.strip("\n"))
    if not words:
        return
    cell: dict[str, Any] = {"cell_type": "markdown", "id": f"cell-{len(cells)}", "metadata": {}}
    pictures = {name: GUIDE / name for _, name in IMAGE.findall(words)}
    if pictures:
        words = IMAGE.sub(r"![\1](attachment:\2)", words)
        cell["attachments"] = {
            name: {KINDS[path.suffix]: base64.b64encode(path.read_bytes()).decode()} for name, path in pictures.items()
        }
    cell["source"] = words.splitlines(keepends=True)
    cells.append(cell)


def add_code(cells: list[dict[str, Any]], experiment: Experiment) -> None:
    """Append a cell of code, with what it prints."""
    printed = [line + "\n" for line in experiment.printed]
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
    cells.append(
        {
            "cell_type": "code",
            "id": f"cell-{len(cells)}",
            "metadata": {},
            "execution_count": None,
            "source": experiment.code.rstrip("\n").splitlines(keepends=True),
            "outputs": outputs,
        }
    )


def format_notebook(chapter: Path) -> str:
    """Return the text of a chapter's file: JSON."""
    return json.dumps(make_notebook(chapter), indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, metavar="FOLDER", help="default: %(default)s")
    folder = parser.parse_args(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    for chapter in CHAPTERS:
        path = folder / f"{chapter.stem}.ipynb"
        path.write_text(format_notebook(chapter), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
