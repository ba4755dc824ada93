"""The figures of the pages are those of benchmarks/results, and each of them has a machine, a commit and a command."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from helpers.paths import ROOT

from benchmarks.draw_speed import draw
from benchmarks.figures import Cell, Results, Table, list_figures, read, read_all, update
from benchmarks.make_tables import BLOCK, PAGES, PICTURE, fill, find_stale, make_anchor

RESULTS = read_all()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages and of the results."""
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    (tmp_path / "docs").mkdir()
    for name in (*PAGES, PICTURE):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(path: Path, key: str, value: Any) -> None:
    """Write another value into one file of results."""
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def read_text_beside_blocks(page: str) -> str:
    """Return a page without what the script writes."""
    return BLOCK.sub("", (ROOT / page).read_text())


def list_ratios(results: Results) -> Iterator[tuple[str, Cell, list[Cell]]]:
    """Yield each cell that has a ratio, and the cells of our engine that it may be a ratio to."""
    for name, table in results.tables.items():
        ours = [cells for row, cells in table.rows.items() if row.startswith("ours")]
        for row, cells in table.rows.items():
            for column, cell in enumerate(cells):
                if cell is not None and cell.ratio is not None:
                    own = [found[column] for found in ours if found[column] is not cell]
                    yield f"{name}, {row}, {table.columns[column]}", cell, [found for found in own if found is not None]


def find_bounds(figure: float, text: str) -> tuple[float, float]:
    """Return between what a number was before it was rounded to the digits of a text."""
    half = 0.5 * 10 ** -len(text.partition(".")[2])
    return figure - half, figure + half


def agrees(cell: Cell, own: Cell) -> bool:
    """Return whether a ratio is that of the middles, or of the best runs, as rates or as seconds."""
    assert cell.ratio is not None
    low, high = find_bounds(float(cell.ratio), cell.ratio)
    for pick in (median, max):
        ours = find_bounds(pick(map(float, own.figures)), own.figures[0])
        theirs = find_bounds(pick(map(float, cell.figures)), cell.figures[0])
        for top, bottom in ((ours, theirs), (theirs, ours)):
            if top[0] / bottom[1] <= high and low <= top[1] / bottom[0]:
                return True
    return False


def test_the_pages_and_the_picture_say_what_the_results_say() -> None:
    assert not find_stale(ROOT), "run python benchmarks/make_tables.py"


@pytest.mark.parametrize("page", [*PAGES, PICTURE])
def test_a_figure_that_was_changed_by_hand_is_found(copy: Path, page: str) -> None:
    text = (copy / page).read_text()
    block = BLOCK.search(text)
    written = block[0] if block else text
    figure = re.findall(r"[ >](\d+\.\d+)[ <]", written)[0]
    (copy / page).write_text(text.replace(written, written.replace(figure, "9.99")))
    assert find_stale(copy) == {page: text}


def test_a_table_that_is_measured_anew_changes_no_other_figure(copy: Path) -> None:
    path = copy / "benchmarks" / "results" / "zen5.json"
    before = read(path)
    update(path, {"new": {"columns": ["one"], "rows": {"ours": ["1.30"], "x": [{"figures": "0.65", "ratio": "2.00"}]}}})
    now = read(path)
    assert now.tables.pop("new") == Table(["one"], {"ours": [Cell(["1.30"], None)], "x": [Cell(["0.65"], "2.00")]}, {})
    assert now == before


def test_a_figure_that_changes_in_the_results_changes_in_each_page(copy: Path) -> None:
    path = copy / "benchmarks" / "results" / "xeon-amx.json"
    path.write_text(path.read_text().replace("27.8", "27.7").replace("1.48", "1.49"))
    stale = find_stale(copy)
    assert set(stale) == {"docs/benchmarks.md", "docs/compare.md", PICTURE}
    assert "27.7 [1.49]" in stale["docs/benchmarks.md"]
    assert "| 1.49 |" in stale["docs/compare.md"]


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_stands_in_one_place(page: str) -> None:
    """The blocks that the script writes are one place. The text beside them repeats no figure of the results."""
    figures = {
        figure for found in RESULTS.values() for figure in list_figures(found) if re.fullmatch(r"\d+\.\d+", figure)
    }
    said = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", read_text_beside_blocks(page))
    assert not figures.intersection(said)


def test_a_measurement_stands_in_one_file() -> None:
    tables = [str(table) for found in RESULTS.values() for table in found.tables.values()]
    assert len(set(tables)) == len(tables)


@pytest.mark.parametrize("name", RESULTS)
def test_each_ratio_is_that_of_its_figures(name: str) -> None:
    for place, cell, own in list_ratios(RESULTS[name]):
        assert any(agrees(cell, found) for found in own), place


@pytest.mark.parametrize("name", RESULTS)
def test_each_file_is_linked_and_each_comparison_leads_to_a_section(name: str) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"results/{name}.json)" in page
    anchors = {make_anchor(heading) for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
    assert {make_anchor(entry.section) for entry in RESULTS[name].comparisons} <= anchors


def test_each_script_of_the_evidence_is_named_where_a_reader_finds_it() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.json")]
    texts = "".join(page.read_text() for page in pages)
    scripts = (ROOT / "benchmarks" / "evidence").glob("*.py")
    assert not [script.name for script in scripts if f"benchmarks/evidence/{script.name}" not in texts]


@pytest.mark.parametrize(("key", "value"), [("machine", ""), ("commit", ""), ("commands", [])])
def test_figures_without_a_machine_a_commit_or_a_command_are_refused(copy: Path, key: str, value: Any) -> None:
    path = copy / "benchmarks" / "results" / "zen5.json"
    change(path, key, value)
    with pytest.raises(ValueError, match=f"zen5.json has figures without {key}"):
        read(path)


@pytest.mark.parametrize(
    "cells", [[1.5], [1.5, "fast"], [1.5, []], [1.5, [2, None]], [1.5, {"figures": 2}], [1.5, {"ratio": 2}]]
)
def test_a_row_that_does_not_fit_its_table_is_refused(copy: Path, cells: list[Any]) -> None:
    path = copy / "benchmarks" / "results" / "zen5.json"
    change(path, "tables", {"speed": {"columns": ["one", "many"], "rows": {"ours": cells}}})
    with pytest.raises(ValueError, match="cell"):
        read(path)


def test_a_comparison_of_a_cell_without_a_ratio_is_refused(copy: Path) -> None:
    path = copy / "benchmarks" / "results" / "zen5.json"
    ratios = {"a batch": ["speed", "ours", "`--preset cpu`"]}
    entry = {"machine": "Zen 5", "section": "Zen 5", "ours": "bfloat16", "beside": "vLLM", "ratios": ratios}
    change(path, "comparisons", [entry])
    with pytest.raises(ValueError, match="without a ratio"):
        read(path)


def test_a_block_of_a_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError, match="zen9"):
        fill("<!-- figures: zen9; speed -->\n<!-- end -->\n", "docs/benchmarks.md", RESULTS)


def test_the_bars_of_a_workload_are_as_long_as_its_numbers() -> None:
    bars = {"ours": ["10", "300"], "theirs: 1": ["5", "400"]}
    rows = {name: [Cell([figure], None) for figure in figures] for name, figures in bars.items()}
    picture = draw("", Table(["one", "many"], rows, {}))
    widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', picture)]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert widths[2] == pytest.approx(3 / 4 * widths[3], abs=0.1)  # lengths have one decimal
    assert widths[0] == widths[3]


def test_the_readme_shows_the_picture() -> None:
    assert f"]({PICTURE})" in (ROOT / "README.md").read_text()
