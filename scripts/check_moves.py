"""Compares the functions and classes of two checkouts: a commit that only moves code changes no body.

git worktree add /tmp/before COMMIT && python scripts/check_moves.py /tmp/before .

A body is compared as a syntax tree, so comments, line breaks and the places of imports do not count. It prints each
name that only one side has, or that has another body; the exit status is 1 if there is one.
"""

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path


def find_bodies(root: Path) -> Counter[tuple[str, str]]:
    """Return {(name, body): how often it is there} of every top-level function and class of the package."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted((root / "nanovllm").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.ImportFrom | ast.Import):
                        inner.names = []
                    if isinstance(inner, ast.ImportFrom):
                        inner.module = None
                found[node.name, ast.dump(node)] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    before = find_bodies(args.before)
    after = find_bodies(args.after)
    for name, _ in before - after:
        print(f"only before, or changed: {name}")
    for name, _ in after - before:
        print(f"only after, or changed: {name}")
    print(f"{sum((before & after).values())} functions and classes are equal")
    return before != after


if __name__ == "__main__":
    sys.exit(main())
