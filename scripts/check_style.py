"""Finds three habits that make code slow to read. It prints each place; the exit status is 1 if there is one.

python scripts/check_style.py [FOLDER_OR_FILE...]    default: every Python file of the project

* One statement assigns unrelated values: `a, b = x, y`. Unpacking one value (`rows, ends = plan(...)`) is fine, and so
  are swaps and updates in which a value reads what an earlier name of the same statement held (`a, b = b, a + b`).
* A docstring opens with "What".
* A function's name begins with `of_`: it is no verb.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in FOLDERS])
    complaints = [
        f"{path}:{line}: {complaint}"
        for path in python_files(parser.parse_args().paths)
        for line, complaint in sorted(find_habits(path.read_text()))
    ]
    print("\n".join(complaints) or "no place found")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
