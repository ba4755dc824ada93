"""Counts lines of code: the spine, each wing, and what is not Python.

python scripts/count_lines.py [FOLDER_OF_THE_PACKAGE]

The spine is every file that `import nanovllm.llm` loads; every other file belongs to a wing. Comments, docstrings and
blank lines do not count.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "nanovllm"
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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            is_early = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            is_early = False
            is_for_types = True
        for child in ast.iter_child_nodes(node):
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


def find_room(module: str) -> str:
    """Return the folder of a module, or its own name if it lies directly in the package."""
    return [*module.split("."), "__init__"][1]


def count_rooms(package: Path) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count lines of code: of the spine by room, of the wings by room, and of other languages by language.

    A file of a spine's folder that the spine does not load counts as a wing of its own, by its full name.
    """
    modules = find_modules(package)
    loaded = find_spine(modules)
    rooms_of_spine = {find_room(module) for module in loaded}
    spine = Counter[str]()
    wings = Counter[str]()
    for module, path in modules.items():
        room = find_room(module)
        lines = python_lines(path.read_text())
        if module in loaded:
            spine[room] += lines
        else:
            wings[module.removeprefix("nanovllm.") if room in rooms_of_spine else room] += lines
    others = Counter[str]()
    for path in sorted(package.rglob("*")):
        if path.suffix in LANGUAGES:
            others[LANGUAGES[path.suffix]] += other_lines(path.read_text())
    return spine, wings, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=PACKAGE)
    spine, wings, others = count_rooms(parser.parse_args().package.resolve())
    for title, rooms in (("the spine", spine), ("the wings", wings), ("other languages", others)):
        print(f"{title:24s} {rooms.total():6,d}")
        for room, lines in rooms.most_common():
            print(f"    {room:20s} {lines:6,d}")
    print(f"{'Python in the package':24s} {spine.total() + wings.total():6,d}")


if __name__ == "__main__":
    main()
