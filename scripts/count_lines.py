"""Lines of code by room: Python without comments, docstrings and blank lines, C++ without comments and blank lines.

python scripts/count_lines.py [FOLDER]
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ENGINE = ("engine", "runner", "models", "layers", "llm", "config", "resolve", "load", "sampling_params")
"""The rooms of the engine proper: what a reader needs to understand how it works."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(source: str) -> int:
    """Lines that hold a token of code; strings that stand alone, as docstrings do, are none."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cpp_lines(source: str) -> int:
    source = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)
    return sum(1 for line in source.splitlines() if line.strip() and not line.strip().startswith("//"))


def count(package: Path) -> tuple[Counter[str], Counter[str]]:
    """Lines of (Python, C++) of each room: a folder of the package, or a file beside them."""
    python, cpp = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if path.suffix == ".py":
            python[room] += python_lines(path.read_text())
        elif path.suffix in (".cpp", ".h"):
            cpp[room] += cpp_lines(path.read_text())
    return python, cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=Path(__file__).parent.parent / "nanovllm")
    python, cpp = count(parser.parse_args().package)
    print(f"{'room':20s} Python   C++")
    for room in sorted(python, key=lambda room: (room not in ENGINE, room)):
        print(f"{room:20s} {python[room]:6d} {cpp[room] or '':>5}")
    print(f"{'the engine proper':20s} {sum(python[room] for room in ENGINE):6d}")
    print(f"{'the package':20s} {python.total():6d} {cpp.total():5d}")


if __name__ == "__main__":
    main()
