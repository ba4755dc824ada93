"""Changes a module in one place at a time, and shows which changes its tests do not notice.

    python scripts/mutants.py nanovllm/engine/order.py tests/features/test_order.py
    python scripts/mutants.py nanovllm/engine/order.py tests/features tests/engine --count 40 --seed 1

First the tests run once, and each line of the module learns which tests reach it, also in the processes that they
start. Then each of `count` changes, drawn at random, meets the quickest of the tests that reach its line, in a copy of
the repository. A change that all of them pass is a hole of the tests, unless it changes nothing that anybody promises.
That is for a reader to judge.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

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


def list_parts(tree: ast.Module, line: int) -> range:
    """Return the lines of the statement that has a line, without its body: not each of them is noted as reached."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= end_of(node)]
    statement = max(around, key=lambda node: node.lineno)
    body = getattr(statement, "body", None)
    return range(statement.lineno, body[0].lineno if body else end_of(statement) + 1)


def end_of(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def setter(owner: Any, key: Any, value: Any) -> Callable[[], None]:
    """Return a function that sets a field of a node, or an element of a list."""
    return lambda: owner.__setitem__(key, value) if isinstance(owner, list) else setattr(owner, key, value)


# ---- runs


class Copy:
    """A copy of the repository, with an environment whose every process imports the package from it.

    The environment has the packages of the one that runs this. PYTHONPATH would not do: tests start processes without
    it, and an installed package is then the unchanged one.
    """

    def __init__(self, place: Path) -> None:
        """Make both in a folder."""
        self.folder = place / "copy"
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".hypothesis")
        shutil.copytree(ROOT, self.folder, ignore=ignored)
        self._python = str(place / "env" / "bin" / "python")
        venv.create(place / "env", symlinks=True)
        self._packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(place / "env")}))
        others = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
        lines = [str(self.folder), *(f"import site; site.addsitedir({other!r})" for other in others)]
        (self._packages / "copy.pth").write_text("\n".join(lines))

    def run_pytest(self, arguments: list[str], seconds: float) -> int:
        """Run tests. Return pytest's status; 124 if they took too long."""
        command = [self._python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTEST_ADDOPTS": ""}
        null = subprocess.DEVNULL
        streams = {"stdin": null, "stdout": null, "stderr": null}
        process = subprocess.Popen(command, cwd=self.folder, env=environment, start_new_session=True, **streams)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what its tests have left
            process.wait()

    def find_reaching(self, module: Path, tests: list[str]) -> dict[int, list[tuple[float, str]]]:
        """Return the tests that reach each line of a module, in whatever process, with their seconds."""
        notes = self._packages / "notes"
        notes.write_bytes(b"\0")
        hook = self._packages / "reached_lines.pth"
        hook.write_text(f"import scripts.reached_lines as lines; lines.start({str(module)!r}, {str(notes)!r})")
        if status := self.run_pytest(["-p", "scripts.reached_lines", *tests], 3600):
            sys.exit(f"the unchanged code does not pass: pytest's status is {status}")
        hook.unlink()
        reaching: dict[int, list[tuple[float, str]]] = defaultdict(list)
        lines: set[int] = set()
        for found in map(json.loads, notes.read_bytes()[1:].splitlines()):
            if isinstance(found, int):
                lines.add(found)
                continue
            for line in lines:
                reaching[line].append(tuple(found))
            lines.clear()
        return reaching


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="the file that is changed")
    parser.add_argument("tests", nargs="+", help="files or folders of tests that should notice")
    parser.add_argument("--count", type=int, default=20, help="how many changes are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=14, help="how many tests a change meets")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        copy = Copy(Path(place))
        module = copy.folder / args.module
        reaching = copy.find_reaching(module, args.tests)
        source = module.read_text()
        size = sum(1 for _ in list_changes(ast.parse(source)))
        survivors = 0
        for number in sorted(random.Random(args.seed).sample(range(size), min(args.count, size))):
            tree = ast.parse(source)
            line, what, change = list(list_changes(tree))[number]
            reached = {test for part in list_parts(tree, line) for test in reaching[part]}
            tests = [name for _, name in sorted(reached)[: args.most]]
            change()
            module.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            # Python takes a compiled file for that of a source with the same size and second.
            Path(cache_from_source(str(module))).unlink(missing_ok=True)
            status = copy.run_pytest(tests, 300) if tests else None
            verdicts = {None: "no test reaches it", 0: "SURVIVES", 1: "noticed", 124: "hangs"}
            verdict = verdicts.get(status, f"ends pytest with status {status}")
            survivors += status in (None, 0)
            print(f"{args.module}:{line}: {verdict}: {what}", flush=True)
        print(f"{survivors} of {min(args.count, size)} changes pass")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
