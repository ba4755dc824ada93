"""Counts lines of code: the spine, everything else, and what is not Python.

python scripts/count_lines.py [FOLDER_OF_THE_PACKAGE]

The spine is every file that `import nanovllm.llm` loads. Comments, docstrings and blank lines do not count.
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


def find_place(module: str) -> str:
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
        counted[find_place(module)] += python_lines(path.read_text())
    others = Counter[str]()
    for path in sorted(package.rglob("*")):
        if path.suffix in LANGUAGES:
            others[LANGUAGES[path.suffix]] += other_lines(path.read_text())
    return spine, rest, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=PACKAGE)
    spine, rest, others = count_places(parser.parse_args().package.resolve())
    for title, places in (("the spine", spine), ("everything else", rest), ("other languages", others)):
        print(f"{title:28s} {places.total():6,d}")
        for place, lines in places.most_common():
            print(f"    {place:24s} {lines:6,d}")
    print(f"{'Python in the package':28s} {spine.total() + rest.total():6,d}")


if __name__ == "__main__":
    main()
