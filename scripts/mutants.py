"""Changes a module in one place at a time, and shows which changes its tests do not notice.

    python scripts/mutants.py nanovllm/engine/order.py tests/features/test_order.py
    python scripts/mutants.py nanovllm/engine/order.py tests/features tests/engine --count 40 --seed 1

First the tests run once, and each line of the module learns which tests reach it. Then each of `count` changes, drawn
at random, meets the quickest of the tests that reach its line, in a copy of the repository. A change that all of them
pass is a hole of the tests, unless it changes nothing that anybody promises. That is for a reader to judge.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = "MUTANTS_FILE"
"""The variable of the environment with the module whose lines are noted."""
REPORT = "MUTANTS_REPORT"
"""The variable with the file that gets the lines and seconds of each test."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}


# ---- the plugin of pytest that notes lines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note which lines of the module a test reaches, with its set-up."""
    module = os.environ[FILE]
    lines: set[int] = set()

    def note(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != module:
            return None
        lines.add(frame.f_lineno)
        return note

    since = count_seconds()
    threading.settrace(note)
    sys.settrace(note)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        found = {"test": item.nodeid, "lines": sorted(lines), "seconds": count_seconds() - since}
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps(found) + "\n")


def count_seconds() -> float:
    """Return the processor's time of this process and of the children that have ended: a test may start some."""
    return sum(os.times()[:4])


# ---- changes


def list_changes(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yield the line of each change, its description, and a function that makes it in the tree."""

    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if type(value) in SWAPPED and hasattr(node, "lineno"):
                other = SWAPPED[type(value)]()
                yield node.lineno, f"{ast.unparse(node)}: {type(other).__name__}", setter(node, name, other)
            for index, part in enumerate(value if isinstance(value, list) else []):
                if type(part) in SWAPPED:
                    other = SWAPPED[type(part)]()
                    line = getattr(part, "lineno", getattr(node, "lineno", 0))
                    what = ast.unparse(node).splitlines()[0]
                    yield line, f"{what}: {type(other).__name__}", setter(value, index, other)
                is_docstring = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                if isinstance(part, ast.Assign | ast.AugAssign | ast.Raise | ast.Expr) and not is_docstring:
                    yield part.lineno, f"without {ast.unparse(part)}", setter(value, index, ast.Pass())
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.lineno, f"{node.value} + 1", setter(node, "value", node.value + 1)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            opposite = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            yield node.lineno, f"not ({ast.unparse(node.test)})", setter(node, "test", opposite)
        if isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
            yield node.lineno, f"{ast.unparse(node)}: None", setter(node, "value", ast.Constant(None))


def setter(owner: Any, key: Any, value: Any) -> Callable[[], None]:
    """Return a function that sets a field of a node, or an element of a list."""
    return lambda: owner.__setitem__(key, value) if isinstance(owner, list) else setattr(owner, key, value)


# ---- runs


def run_pytest(folder: Path, arguments: list[str], seconds: float, **variables: str) -> int:
    """Run tests in a copy of the repository. Return pytest's status; 124 if they took too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="the file that is changed")
    parser.add_argument("tests", nargs="+", help="files or folders of tests that should notice")
    parser.add_argument("--count", type=int, default=20, help="how many changes are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=14, help="how many tests a change meets")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "copy")
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", "__pycache__", ".hypothesis"))
        module = folder / args.module
        report = Path(place, "report")
        noting = ["-p", "scripts.mutants", *args.tests]
        if status := run_pytest(folder, noting, 3600, **{FILE: str(module), REPORT: str(report)}):
            sys.exit(f"the unchanged code does not pass: pytest's status is {status}")
        reaching: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for found in map(json.loads, report.read_text().splitlines()):
            for line in found["lines"]:
                reaching[line].append((found["seconds"], found["test"]))
        source = module.read_text()
        size = sum(1 for _ in list_changes(ast.parse(source)))
        survivors = 0
        for number in sorted(random.Random(args.seed).sample(range(size), min(args.count, size))):
            tree = ast.parse(source)
            line, what, change = list(list_changes(tree))[number]
            tests = [name for _, name in sorted(reaching[line])[: args.most]]
            change()
            module.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            status = run_pytest(folder, tests, 300) if tests else -1
            verdict = {-1: "no test reaches it", 0: "SURVIVES", 1: "noticed", 124: "hangs"}.get(status, "noticed")
            survivors += status in (-1, 0)
            print(f"{args.module}:{line}: {verdict}: {what}", flush=True)
        print(f"{survivors} of {min(args.count, size)} changes pass")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
