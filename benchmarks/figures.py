"""Reads and writes the figures of the project: benchmarks/results/*.json, one file for each measurement.

A file has these keys:

* `machine`, `commit` and `commands`: where and how it was measured. A figure without them is none.
* `versions`, `work`, `runs`, `ceiling`: of the other software, what the figures count, how often it ran, and what the
  machine could do just before. Each may be empty.
* `tables`: maps the name of a table to its `columns`, its `rows` by name, and its `ceilings`: rows that no engine made.
  A cell is null, a figure, a list of figures (one for each run), or an object with these `figures` and our `ratio`.
* `comparisons`: the ratios that docs/compare.md and the README show. Each names the table, the row and the column of a
  cell that has a ratio, and the section of docs/benchmarks.md that explains it. One of the README (`readme`) names the
  row of our own figures, too (`own`).

Figures stay text. So a page shows each as it was written down, with its zeros.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "results"
NUMBER = re.compile(r"\d+(\.\d+)?")


class Cell(NamedTuple):
    """Holds what was measured for one row and column."""

    figures: list[str]
    """One for each run that is kept, or one alone: the middle."""
    ratio: str | None
    """How many times as fast ours is, or None."""


class Table(NamedTuple):
    """Holds the rows of one table. Each has a cell for each column, or None where nothing was measured."""

    columns: list[str]
    rows: dict[str, list[Cell | None]]
    ceilings: dict[str, list[Cell | None]]


class Comparison(NamedTuple):
    """Holds one row of ratios beside another engine."""

    machine: str
    section: str
    """The heading of docs/benchmarks.md that explains them."""
    ours: str
    beside: str
    ratios: dict[str, str]
    """Maps "one request", "8 requests", "a batch" and "prompts" to a ratio, as far as they were measured."""
    in_readme: bool
    rate: str
    """Our tokens a second in the batch: the median of the runs. Empty if the README does not show it."""


class Results(NamedTuple):
    """Holds one file."""

    name: str
    machine: str
    commit: str
    versions: str
    work: str
    runs: str
    ceiling: str
    commands: list[str]
    tables: dict[str, Table]
    comparisons: list[Comparison]


def read_all(folder: Path = FOLDER) -> dict[str, Results]:
    """Return the results of all files of a folder, by the names of the files, in their order."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    return {path.stem: read(path) for path in paths}


def read(path: Path) -> Results:
    """Return the results of one file.

    Raises:
        ValueError: The file names no machine, commit or command, a row has not a cell for each column, or a comparison
            names a cell that has no ratio.
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_float=str, parse_int=str)
    for key in ("machine", "commit", "commands"):
        if not data.get(key):
            raise ValueError(f"{path.name} has figures without {key}")
    tables = {name: _read_table(table, f"{path.name}, {name}") for name, table in data["tables"].items()}
    comparisons = []
    for entry in data["comparisons"]:
        ratios = {}
        for column, (table, row, cell) in entry["ratios"].items():
            found = tables[table].rows[row][tables[table].columns.index(cell)]
            if found is None or found.ratio is None:
                raise ValueError(f"{path.name} compares a cell without a ratio: {table}, {row}, {cell}")
            ratios[column] = found.ratio
        machine, section, ours, beside = (entry[key] for key in ("machine", "section", "ours", "beside"))
        rate = ""
        if in_readme := entry.get("readme", False):
            table, _, column = entry["ratios"]["a batch"]
            rate = _read_rate(tables[table], entry["own"], column)
        comparisons.append(Comparison(machine, section, ours, beside, ratios, in_readme, rate))
    said = {key: data[key] for key in ("machine", "commit", "versions", "work", "runs", "ceiling", "commands")}
    return Results(path.stem, **said, tables=tables, comparisons=comparisons)


def update(path: Path, tables: Mapping[str, Any], **said: Any) -> None:
    """Write tables into a file, beside those that it has, and what else is said of them."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_float=str)  # so 1.30 stays 1.30
    data |= said
    data["tables"] |= tables
    text = json.dumps(data, indent=2, ensure_ascii=False)
    rows = re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(rows + "\n", encoding="utf-8")


def list_figures(results: Results) -> Iterator[str]:
    """Yield each figure and each ratio of a file."""
    for table in results.tables.values():
        for cells in [*table.rows.values(), *table.ceilings.values()]:
            for cell in cells:
                if cell is not None:
                    yield from cell.figures
                    if cell.ratio is not None:
                        yield cell.ratio


def _read_table(table: dict[str, Any], place: str) -> Table:
    columns: list[str] = table["columns"]
    parts: list[dict[str, list[Cell | None]]] = []
    for part in ("rows", "ceilings"):
        rows = {name: [_read_cell(cell) for cell in cells] for name, cells in table.get(part, {}).items()}
        for name, cells in rows.items():
            if len(cells) != len(columns):
                raise ValueError(f'{place}: "{name}" has {len(cells)} cells, and the table {len(columns)} columns')
        parts.append(rows)
    return Table(columns, *parts)


def _read_rate(table: Table, row: str, column: str) -> str:
    """Return the median of a cell's runs, in whole numbers."""
    cell = table.rows[row][table.columns.index(column)]
    if cell is None:
        raise ValueError(f'"{row}" has no figure under {column}')
    return f"{round(median(map(float, cell.figures))):,}"


def _read_cell(cell: Any) -> Cell | None:
    """Return one cell. The parser has left its numbers as text."""
    if cell is None:
        return None
    has_ratio = isinstance(cell, dict)
    figures = cell.get("figures") if has_ratio else cell
    ratio = cell.get("ratio") if has_ratio else None
    if isinstance(figures, str):
        figures = [figures]
    numbers = [*(figures or [None]), *([ratio] if has_ratio else [])]
    if not all(isinstance(number, str) and NUMBER.fullmatch(number) for number in numbers):
        raise ValueError(f"a cell is null, a figure, a list of figures, or figures with a ratio, not {cell}")
    return Cell(figures, ratio)
