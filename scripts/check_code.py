"""Looks at the code as text: it counts lines, shows the rings, and finds three habits that make code slow to read.

    python scripts/check_code.py lines [PACKAGE]            the spine, everything else, and what is not Python
    python scripts/check_code.py rings [PACKAGE]            the rings, and the imports that point outwards
    python scripts/check_code.py style [FOLDER_OR_FILE...]  each habit with its place; status 1 if there is one

The spine is every file that `import nanovllm.llm` loads. Comments, docstrings and blank lines do not count.

A module may import what lies in its own ring or further in. Imports within functions, and imports for types alone,
count like all others. docs/architecture.md prints the table, and tests/docs/test_rings.py holds the rule.

The habits are:

* One statement assigns unrelated values: `a, b = x, y`. Unpacking one value (`rows, ends = plan(...)`) is fine, and so
  are swaps and updates in which a value reads what an earlier name of the same statement held (`a, b = b, a + b`).
* A docstring opens with "What".
* A function's name begins with `of_`: it is no verb.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LANGUAGES = {".cpp": "C++", ".h": "C++", ".js": "JavaScript", ".html": "HTML", ".css": "CSS"}


class Import(NamedTuple):
    """One module of the package that a file imports."""

    module: str
    is_early: bool
    """Whether loading the file loads the module: not within a function, and not under TYPE_CHECKING."""
    is_for_types: bool
    """Whether it stands under TYPE_CHECKING, so that no program runs it."""


def python_lines(source: str) -> int:
    """Count the lines that hold a token of code. Strings that stand alone, as docstrings do, are no code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def other_lines(source: str) -> int:
    """Count the lines of C++, JavaScript, HTML or CSS that hold more than a comment."""
    comment = re.compile(r"/\*.*?\*/|<!--.*?-->", re.DOTALL)
    source = comment.sub(lambda found: "\n" * found[0].count("\n"), source)
    return sum(1 for line in source.splitlines() if line.strip() and not line.strip().startswith("//"))


def find_modules(package: Path) -> dict[str, Path]:
    """Map the dotted name of each module of the package to its file."""
    root = package.parent
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


def find_imports(path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Yield the modules of the package that a file imports, wherever in the file, also for types alone."""

    def visit(node: ast.AST, is_early: bool, is_for_types: bool) -> Iterator[Import]:
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from a.b import c` loads a.b, and a.b.c if that is a module.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (Import(name, is_early, is_for_types) for name in names if name in modules)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_early = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            is_early = False
            is_for_types = True
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # an expression imports nothing, and most nodes are parts of one
                yield from visit(child, is_early, is_for_types)

    return visit(ast.parse(path.read_text()), is_early=True, is_for_types=False)


def find_spine(modules: dict[str, Path], start: str = "nanovllm.llm") -> set[str]:
    """Return the modules that `import nanovllm.llm` loads, by the early imports of every file on the way."""
    spine: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in modules and module not in spine:
            spine.add(module)
            waiting += [found.module for found in find_imports(modules[module], modules) if found.is_early]
            waiting.append(module.rpartition(".")[0])  # a folder's __init__ is loaded before its files
    return spine


def find_counted_place(module: str) -> str:
    """Return where a module is counted: a folder, a file, or a part of features, apps or backends."""
    parts = [*module.split(".")[1:], "__init__"]
    return "/".join(parts[:2]) if parts[0] in ("features", "apps", "backends") else parts[0]


def count_places(package: Path) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count lines of code: of the spine by place, of everything else by place, and of other languages by language."""
    modules = find_modules(package)
    loaded = find_spine(modules)
    spine = Counter[str]()
    rest = Counter[str]()
    for module, path in modules.items():
        counted = spine if module in loaded else rest
        counted[find_counted_place(module)] += python_lines(path.read_text())
    others = Counter[str]()
    for path in sorted(package.rglob("*")):
        if path.suffix in LANGUAGES:
            others[LANGUAGES[path.suffix]] += other_lines(path.read_text())
    return spine, rest, others


# ---- rings

VALUES, PLANNING, MODEL, FAMILIES, FEATURES, DEVICES, FACE, APPLICATIONS = range(8)
NAMES = ("values", "planning", "the model", "families", "features", "devices", "the face", "applications")
"""The contents of each ring, from the innermost outwards."""

RINGS = {
    "utils": VALUES,
    "version": VALUES,
    "inputs": VALUES,
    "outputs": VALUES,
    "sampling_params": VALUES,
    "config": VALUES,
    "text": PLANNING,
    "engine": PLANNING,
    "ops": MODEL,
    "models": MODEL,
    "backends": MODEL,
    "runner": MODEL,
    "features/families": FAMILIES,
    "features": FEATURES,
    "backends/cpu": DEVICES,
    "backends/gpu": DEVICES,
    "load": FACE,
    "llm": FACE,
    "__init__": APPLICATIONS,
    "apps": APPLICATIONS,
    "__main__": APPLICATIONS,
    "as_vllm": APPLICATIONS,
    "lm_eval": APPLICATIONS,
    "ray": APPLICATIONS,
}
"""The ring of each folder or loose file. The longest path that fits a module counts."""

EXCEPTIONS = {
    # The program of another process puts an engine together there, as the caller's process does here.
    ("features/distributed/replica", "load"),
    ("features/distributed/worker", "load"),
}
"""The imports that may point outwards: (importing module, imported module)."""


def find_place(module: str) -> str:
    """Return a module's path within the package, without `.py`."""
    return module.removeprefix("nanovllm").removeprefix(".").replace(".", "/") or "__init__"


def find_ring(place: str) -> int:
    """Return the ring of a module's path."""
    fitting = [path for path in RINGS if f"{place}/".startswith(f"{path}/")]
    return RINGS[max(fitting, key=len)]


@cache
def find_arrows(package: Path = PACKAGE) -> list[tuple[str, str]]:
    """Return (importing module, imported module) for every import of the package, as paths."""
    modules = find_modules(package)
    return [
        (find_place(module), find_place(found.module))
        for module, file in modules.items()
        for found in find_imports(file, modules)
    ]


def find_outward_arrows(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Return the arrows that point outwards."""
    return {(start, end) for start, end in find_arrows(package) if find_ring(end) > find_ring(start)}


def find_largest_circle(package: Path = PACKAGE) -> set[str]:
    """Return the largest set of modules each of which imports all others, by way of others of the set.

    `import nanovllm` loads the face when it is asked for, so the package itself is no part of a circle.
    """
    arrows = [arrow for arrow in find_arrows(package) if "__init__" not in arrow]
    circles = networkx.strongly_connected_components(networkx.DiGraph(arrows))
    return max(circles, key=len)


def write_table() -> str:
    """Write the rings as a table in Markdown."""
    lines = ["| ring | | folders and files |", "| ---: | --- | --- |"]
    for ring, name in enumerate(NAMES):
        paths = [f"`{path}`" for path, number in RINGS.items() if number == ring]
        lines.append(f"| {ring} | {name} | {', '.join(paths)} |")
    return "\n".join(lines)


# ---- habits

FOLDERS = ("nanovllm", "tests", "benchmarks", "scripts", "examples", "docs", "bench.py", "example.py")


def reads(value: ast.expr, target: ast.expr) -> bool:
    """Whether evaluating `value` reads the place that `target` names."""
    place = ast.unparse(target)
    return any(isinstance(node, ast.expr) and ast.unparse(node) == place for node in ast.walk(value))


def assigns_unrelated_values(node: ast.stmt) -> bool:
    """Whether a statement is a parallel assignment that could be written as several without changing its meaning."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    values = node.value.elts
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            later = ((place, value) for i, place in enumerate(target.elts) for value in values[i + 1 :])
            return not any(reads(value, place) for place, value in later)
    return False


def find_habits(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint) for each place of a file's source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and assigns_unrelated_values(node):
            yield node.lineno, "assigns unrelated values in one statement"
        # A string that stands alone documents the file, class or function that it opens, or the value above it.
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and re.match(r"\s*What\b", text):
            yield node.lineno, 'has a docstring that opens with "What"'
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_").startswith("of_"):
            yield node.lineno, f"{node.name} is no verb"


def python_files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files among `paths` and below them, in order."""
    for path in paths:
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def print_lines(package: Path) -> None:
    """Print the lines of each place, the largest first."""
    spine, rest, others = count_places(package)
    for title, places in (("the spine", spine), ("everything else", rest), ("other languages", others)):
        print(f"{title:28s} {places.total():6,d}")
        for place, lines in places.most_common():
            print(f"    {place:24s} {lines:6,d}")
    print(f"{'Python in the package':28s} {spine.total() + rest.total():6,d}")


def print_rings(package: Path) -> None:
    """Print the table of the rings, the imports that point outwards, and the largest circle of imports."""
    print(write_table())
    print(f"\n{len(find_arrows(package))} imports")
    outward = sorted(find_outward_arrows(package))
    print(f"{len(outward)} point outwards:", *(f"    {start} -> {end}" for start, end in outward), sep="\n")
    circle = find_largest_circle(package)
    print(f"the largest circle has {len(circle)} modules:", *(f"    {module}" for module in sorted(circle)), sep="\n")


def print_habits(paths: list[Path]) -> int:
    """Print each place that has a habit. Return the exit status."""
    complaints = [
        f"{path}:{line}: {complaint}"
        for path in python_files(paths)
        for line, complaint in sorted(find_habits(path.read_text()))
    ]
    print("\n".join(complaints) or "no place found")
    return int(bool(complaints))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, show in (("lines", print_lines), ("rings", print_rings)):
        command = commands.add_parser(name)
        command.add_argument("package", nargs="?", type=Path, default=PACKAGE)
        command.set_defaults(show=show)
    style = commands.add_parser("style")
    style.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in FOLDERS])
    args = parser.parse_args()
    if args.command == "style":
        return print_habits(args.paths)
    args.show(args.package.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
