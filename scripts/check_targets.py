"""Runs the tests of code that is built for other machines than this one, unless they have passed with these sources.

    python scripts/check_targets.py             runs them if tests/targets.json is of other sources
    python scripts/check_targets.py --always    runs them

They take a quarter of an hour on two cores, and so few changes need them: C++ for other processors and with
sanitizers, Triton's kernels compiled for each GPU that we name, and these with Triton 3.6, which torch 2.11 pins.

tests/targets.json has the digest of the kernels, of these tests and of pyproject.toml. It is written here alone, after
all tests have passed and nothing but processors was missing. Whoever changes a kernel runs this and commits the file.
"""

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "targets.json"
OLDER_TRITON = "triton==3.6.0"
MISSING_PROCESSOR = "this processor lacks"
"""A skipped test says so if no machine but another one could run it."""


def find_tests(root: Path = ROOT) -> list[Path]:
    """Return the files with tests of kernels for targets: those marked so, and those of Triton's kernels."""
    words = ("mark.targets", "triton")
    paths = sorted((root / "tests" / "kernels").glob("test_*.py"))
    return [path for path in paths if any(word in path.read_text() for word in words)]


def list_sources(root: Path = ROOT) -> list[Path]:
    """Return the files of the digest: the kernels, and the tests with all helpers that they import."""
    helpers = root / "tests" / "helpers"
    found = {root / "pyproject.toml", root / "tests" / "conftest.py"}
    found |= {path for path in (root / "nanovllm" / "backends").rglob("*") if path.suffix in (".py", ".h", ".cpp")}
    waiting = [*find_tests(root), helpers / "compile_kernels.py"]  # a program: nobody imports it
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.suffix == ".py":
            waiting += [place for name in find_helpers(path) for place in helpers.glob(f"{name}.*")]
    return sorted(found)


def find_helpers(path: Path) -> set[str]:
    """Return the paths, without suffixes, of the helpers that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.removeprefix("helpers.").replace(".", "/") for name in names if name.startswith("helpers.")}
    return found


def compute_digest(root: Path = ROOT) -> str:
    """Return the digest of the names and contents of `list_sources`."""
    digest = hashlib.sha256()
    for path in list_sources(root):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def run_tests(python: str, arguments: Iterable[str], report: Path) -> set[str]:
    """Run tests on two cores. Return why some were skipped. Raises CalledProcessError if one failed, or none ran."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junit-xml={report}", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    return {skipped.get("message", "") for skipped in ElementTree.parse(report).iter("skipped")}


def make_older(folder: Path) -> str:
    """Make an environment with the older Triton and this one's packages. Return its Python.

    Its torch is this one's: a whole torch 2.11 is gigabytes of CUDA (scripts/torch_2_11.sh).
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", OLDER_TRITON], check=True)
    return python


def run_all() -> set[str]:
    """Run every test. Return why some were skipped."""
    marked = [str(path) for path in find_tests() if "mark.targets" in path.read_text()]
    triton = [str(path) for path in find_tests() if "triton" in path.read_text()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        skipped = run_tests(sys.executable, ["-m", "targets", *marked], folder / "report.xml")
        choice = ["-m", "not gpu", "-k", "few-90 or quantised or not slow and not targets"]
        older = make_older(folder / "older")
        return skipped | run_tests(older, [*choice, *triton], folder / "older.xml")


def write_record(digest: str, skipped: set[str]) -> None:
    """Write the file, unless something is missing that could be installed here."""
    missing = sorted(reason for reason in skipped if MISSING_PROCESSOR not in reason)
    if missing:
        print(f"{RECORD.name} stays as it is, because tests were skipped: {'; '.join(missing)}")
        return
    if compute_digest() != digest:
        print(f"{RECORD.name} stays as it is, because a source has changed since the tests began")
        return
    RECORD.write_text(json.dumps({"digest": digest, "skipped": sorted(skipped)}, indent=2) + "\n")
    print(f"all passed: commit {RECORD.name}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--always", action="store_true", help="also if they have passed with these sources")
    args = parser.parse_args(arguments)
    digest = compute_digest()
    if not args.always and RECORD.exists() and json.loads(RECORD.read_text())["digest"] == digest:
        print(f"{RECORD.name}: kernels for other machines have passed with these sources")
        return
    write_record(digest, run_all())


if __name__ == "__main__":
    main()
