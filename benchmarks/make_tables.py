"""Writes what benchmarks/results says into PAGES, and into the README's picture.

    python benchmarks/make_tables.py            after a file of benchmarks/results has changed
    python benchmarks/make_tables.py --check    writes nothing; exits with 1 if a page says something else

In a page `<!-- figures: FILE; TABLE; TABLE -->` begins a block, and `<!-- end -->` ends it. What is between them is
written anew: how it was measured, and these tables of benchmarks/results/FILE.json, or all if none is named. A block
`<!-- ratios: all -->` has the comparisons of all files, and `<!-- ratios: readme -->` those that the README shows.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.draw_speed import draw
from benchmarks.figures import Cell, Comparison, Results, Table, read_all

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/compare.md", "docs/evaluate-gguf.md", "docs/gguf.md")
PICTURE = "docs/speed.svg"
DRAWN = ("xeon-amx", "speed")
"""The file and the table of the picture."""
BLOCK = re.compile(r"(<!-- (figures|ratios): ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    stale = find_stale(ROOT)
    if parser.parse_args().check:
        sys.exit(", ".join(stale) + " differ from benchmarks/results" if stale else 0)
    for name, text in stale.items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(name)


def find_stale(root: Path) -> dict[str, str]:
    """Return the text that each page should have, by its path, for those that have another one."""
    results = read_all(root / "benchmarks" / "results")
    wanted = {page: fill((root / page).read_text(encoding="utf-8"), page, results) for page in PAGES}
    wanted[PICTURE] = draw_picture(results)
    return {name: text for name, text in wanted.items() if (root / name).read_text(encoding="utf-8") != text}


def fill(text: str, page: str, results: dict[str, Results]) -> str:
    """Return a page whose blocks are written anew.

    Args:
        page: the page's path from the root of the project. The links of a block are relative to it.

    Raises:
        KeyError: A block names a file or a table that does not exist.
    """
    here = "" if page.startswith("docs/") else "docs/"

    def write_block(block: re.Match[str]) -> str:
        begin, kind, what, end = block.groups()
        if kind == "ratios":
            comparisons = [entry for found in results.values() for entry in found.comparisons]
            body = write_ratios(comparisons, here, what == "readme")
        else:
            name, *tables = what.split("; ")
            body = write_results(results[name], tables or list(results[name].tables), "" if here else "../")
        return f"{begin}\n{body}\n{end}"

    return BLOCK.sub(write_block, text)


def write_results(results: Results, names: list[str], to_root: str) -> str:
    """Return how something was measured, and tables of it, as Markdown."""
    place = f"[Data and commands]({to_root}benchmarks/results/{results.name}.json)"
    said = {
        "Machine": results.machine,
        "Commit": results.commit,
        "Versions": results.versions,
        "Figures": results.work,
        "Runs": results.runs,
        "Ceiling": results.ceiling,
    }
    sentences = [f"{label}: {text}." for label, text in said.items() if text]
    head = textwrap.fill(" ".join([*sentences, f"{place}."]), WIDTH, break_on_hyphens=False)
    tables = []
    for name in names:
        title = f"**{name[0].upper()}{name[1:]}:**\n\n" if len(names) > 1 else ""
        tables.append(title + write_table(results.tables[name]))
    return "\n".join([head + "\n", *tables])


def write_table(table: Table) -> str:
    """Return a table as Markdown."""
    rows = {**table.rows, **table.ceilings}
    lines = [["", *table.columns], ["---", *["---:"] * len(table.columns)]]
    lines += [[name, *map(write_cell, cells)] for name, cells in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_cell(cell: Cell | None) -> str:
    """Return the runs of a cell, and the ratio in brackets."""
    if cell is None:
        return ""
    figures = ", ".join(f"{int(figure):,}" if figure.isdigit() else figure for figure in cell.figures)
    return figures if cell.ratio is None else f"{figures} [{cell.ratio}]"


def write_ratios(comparisons: list[Comparison], here: str, is_readme: bool) -> str:
    """Return the ratios beside other engines as one table; the README's has our tokens a second in a batch, too."""
    columns = ["one request", "8 requests", "a batch", "prompts"]
    if is_readme:
        columns.remove("8 requests")
    rate = ["tokens a second"] if is_readme else []
    heads = [*rate, *columns]
    lines = [["machine", "ours", "beside", *heads], ["---", "---", "---", *["---:"] * len(heads)]]
    for entry in comparisons:
        if entry.in_readme or not is_readme:
            machine = f"[{entry.machine}]({here}benchmarks.md#{make_anchor(entry.section)})"
            ratios = [entry.ratios.get(column, "") for column in columns]
            rates = [entry.rate] if is_readme else []
            lines.append([machine, entry.ours, entry.beside, *rates, *ratios])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def make_anchor(heading: str) -> str:
    """Return the anchor that GitHub and the site give to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def draw_picture(results: dict[str, Results]) -> str:
    """Return the README's picture."""
    name, table = DRAWN
    machine = "Two cores of an Intel Xeon with AMX. The shape of Qwen3-0.6B, random weights"
    title = f"Tokens a second. {machine}. Commit {results[name].commit}."
    return draw(title, results[name].tables[table])


if __name__ == "__main__":
    main()
