"""Prints the public interface as text: names, signatures, fields with their defaults, and the --help of each command.

    python scripts/interface.py > before.txt        and after the change:
    python scripts/interface.py | diff before.txt -

Public is what `nanovllm` exports, and what the pages of PAGES import or list. In signatures the classes of the package
have no module, so that a class that is not public may move.
"""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nanovllm

ROOT = Path(__file__).parents[1]
PAGES = ("api.md", "porting.md", "ray.md", "evaluation.md")


def find_names() -> list[tuple[str, str]]:
    """Return the public names, each with its module."""
    names = {("nanovllm", name) for name in nanovllm.__all__}
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        names.update(re.findall(r"^::: (nanovllm\.[\w.]+)\.(\w+)$", text, re.MULTILINE))
        for module, found in re.findall(r"from (nanovllm[\w.]*) import (\w+(?:, \w+)*)", text):
            names.update((module, name) for name in found.split(", "))
    return sorted(names)


def shorten(value: Any) -> str:
    """Return the text of a value, without the modules of the package."""
    return re.sub(r"\bnanovllm\.(\w+\.)*", "", str(value))


def describe(value: Any) -> Iterator[str]:
    """Yield lines on one name: arguments, fields with their defaults, methods and properties."""
    if not callable(value):
        yield f"    is {type(value).__name__}"
        return
    try:
        signature = inspect.signature(value)
    except ValueError:  # a TypedDict, or a class whose constructor is written in C
        yield from (f"    {name}: {shorten(kind)}" for name, kind in inspect.get_annotations(value).items())
    else:
        yield from (f"    {shorten(parameter)}" for parameter in signature.parameters.values())
    if not isinstance(value, type):
        return
    owners = {name: owner for owner in reversed(value.__mro__) for name in vars(owner)}
    for name, owner in sorted(owners.items()):
        if name.startswith("_") or not owner.__module__.startswith("nanovllm"):
            continue
        member = inspect.getattr_static(value, name)
        function = getattr(value, name)
        is_method = callable(function) and not isinstance(member, property)
        yield f"    .{name}{shorten(inspect.signature(function)) if is_method else ''}"


def run_help(*command: str) -> str:
    """Return the --help of a Python file or module."""
    environment = os.environ | {"COLUMNS": "500"}
    found = subprocess.run(
        [sys.executable, *command, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    return found.stdout.replace(str(ROOT), "ROOT")


def main() -> None:
    first_names: dict[int, str] = {}
    for module, name in find_names():
        value = getattr(__import__(module, fromlist=[name]), name)  # as `from` does, which asks for names of vLLM's
        first = first_names.setdefault(id(value), f"{module}.{name}")
        if first != f"{module}.{name}":
            print(f"{module}.{name} is {first}")
            continue
        print(first)
        print(*describe(value), sep="\n")
    overview = run_help("-P", "-m", "nanovllm")
    print("nanovllm --help", overview, sep="\n")
    for command in re.findall(r"^    (\S+)", overview.partition("COMMAND\n")[2], re.MULTILINE):
        print(f"nanovllm {command} --help", run_help("-P", "-m", "nanovllm", command), sep="\n")
    for path in [ROOT / "bench.py", *sorted((ROOT / "scripts").glob("*.py"))]:
        if "argparse" in path.read_text() and path != Path(__file__):
            print(f"{path.relative_to(ROOT)} --help", run_help(str(path)), sep="\n")


if __name__ == "__main__":
    main()
