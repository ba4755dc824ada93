"""The README stays short, and its speeds are those of docs/benchmarks.md."""

import re

import pytest
from helpers.paths import ROOT

from scripts.draw_speed import HEADING, PAGE, PICTURE, Table, draw, read_table

README = (ROOT / "README.md").read_text()
COMPARED = re.findall(r"^\| \[.*benchmarks\.md#.*$", README + (ROOT / "docs" / "compare.md").read_text(), re.MULTILINE)
"""The rows of the README and of docs/compare.md that link to a section of the benchmarks and quote its ratios."""


def find_section(anchor: str) -> str:
    """Return the section of docs/benchmarks.md that a link leads to."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        if re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") == anchor:
            return section
    raise AssertionError(f"there is no section {anchor}")


def test_the_readme_is_short_and_shows_python_first() -> None:
    assert len(README.split()) <= 900
    assert README[: README.index("```python")].count("\n") + 1 < 25


def test_the_first_block_of_the_readme_has_the_two_commands_that_are_run_before_a_change_lands() -> None:
    first = re.search(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].split("&& ")[1].strip() for line in first[1].splitlines()] == [
        "python example.py",
        "python -m pytest",
    ]


def test_the_front_page_of_the_site_shows_the_example_of_the_readme_and_its_output() -> None:
    example = re.search(r"^```python\n.*?^```$\n\n^```text\n.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert example is not None and example[0] in (ROOT / "docs" / "index.md").read_text()


def test_the_picture_of_speed_is_drawn_from_the_page_of_benchmarks() -> None:
    table = read_table(PAGE.read_text(), HEADING)
    assert PICTURE.read_text() == draw(table), "run python scripts/draw_speed.py"
    assert table.rows["ours, int8"] == ["41.0", "233.7", "325.9", "1481"]
    assert f"]({PICTURE.relative_to(ROOT)})" in README


def test_the_bars_of_a_workload_are_as_long_as_its_numbers() -> None:
    picture = draw(Table("1234567", ["one", "many"], {"ours": ["10", "300"], "theirs": ["5", "400"]}))
    widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', picture)]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert widths[2] == pytest.approx(3 / 4 * widths[3], abs=0.1)  # lengths have one decimal
    assert widths[0] == widths[3]


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no section"):
        read_table("# Benchmarks\n\n## Another\n", HEADING)


@pytest.mark.parametrize("row", COMPARED)
def test_each_ratio_is_one_of_the_section_that_its_row_links_to(row: str) -> None:
    anchor = row.partition("benchmarks.md#")[2].partition(")")[0]
    ratios = re.findall(r"\| (\d+\.\d+)(?= \|)", row)
    in_section = re.findall(r"\[(\d+\.\d+)\]|\*\*(\d+\.\d+)\*\*", find_section(anchor))
    assert ratios and set(ratios) <= {number for pair in in_section for number in pair}


def test_the_table_of_speed_of_the_readme_has_four_rows() -> None:
    assert sum(row in README for row in COMPARED) == 4
