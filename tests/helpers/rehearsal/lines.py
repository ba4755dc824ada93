"""Finds the lines and branches of the engine's rooms for CUDA that a rehearsal leaves out.

They are named by function, or "(module)" outside of any, and text, so that an edit elsewhere in a file changes no name:

    runner/sampler.py Sampler.sample                    the whole function never runs
    runner/sampler.py Sampler.sample: checked = ...     the line never runs
    runner/sampler.py Sampler.sample: if x: -> return   the line runs, and is never followed by the other one ("end": of
                                                        the function)
    runner/resolve.py                                   only in the list: some of the file never runs
    ~ runner/sampler.py Sampler.sample: y = ...         only in the list: whether it runs depends on time
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.paths import ROOT, TESTS

ROOMS = ("runner", "backends", "features.distributed")
LIST = Path(__file__).with_name("lines.txt")
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
RANKS = "ranks or stages or test_experts"
OTHERS = "half_precision or flash or preemption or sleep or states"
"""Tests that take about a third of the rehearsal's time, and another third."""
REHEARSALS = (
    (*PYTEST, "tests/runner/test_rehearsal.py", "-k", RANKS),
    (*PYTEST, "tests/runner/test_rehearsal.py", "-k", f"not ({RANKS} or {OTHERS})"),
    (str(TESTS / "helpers" / "direct_launches.py"),),
    (*PYTEST, "tests/runner/test_rehearsal.py", "-k", OTHERS),
    (str(TESTS / "helpers" / "compile_kernels.py"), "--quick", "90"),
    (*PYTEST, "tests/runner/test_launches.py", "tests/kernels/test_backends.py", "-k", "not direct and not compiled"),
    (*PYTEST, "tests/models/test_pinned_copies.py"),
)
"""The rehearsal, and the compile tests: they run on fake tensors what cannot run in Triton's interpreter. As many
run at a time as there are processors, so the longest come first."""


def measure(folder: Path) -> dict[str, Any]:
    """Run the rehearsals under coverage, and return coverage's report by file.

    Args:
        folder: an empty one, for coverage's files.
    """
    settings = folder / "coverage.ini"
    source = ", ".join(f"nanovllm.{room}" for room in ROOMS)
    settings.write_text(
        f"[run]\nbranch = True\nparallel = True\ndata_file = {folder}/data\n"
        f"source = {source}\nomit = */backends/cpu/*\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST"))}
    environment |= {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run([f"--rcfile={settings}", *command], "run", environment), REHEARSALS))
    _run([f"--rcfile={settings}"], "combine", environment)
    _run([f"--rcfile={settings}", "-q", "-o", str(folder / "report.json")], "json", environment)
    files = json.loads((folder / "report.json").read_text())["files"]
    return {str(Path(name).resolve().relative_to(ROOT / "nanovllm")): found for name, found in files.items()}


def _run(arguments: list[str], command: str, environment: dict[str, str]) -> None:
    line = [sys.executable, "-m", "coverage", command, *arguments]
    result = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (line, result.stdout[-6000:], result.stderr[-4000:])


def name_missing(report: dict[str, Any]) -> set[str]:
    """Return the names of all that never ran."""
    names: set[str] = set()
    for path, found in report.items():
        lines = (ROOT / "nanovllm" / path).read_text().splitlines()
        for function, part in found["functions"].items():
            names |= _name_part(f"{path} {function or '(module)'}", part, lines)
    return names


def _name_part(where: str, part: dict[str, Any], lines: list[str]) -> set[str]:
    """Return the names of what never ran of one function, or of a module outside its functions."""

    def text(number: int) -> str:
        return lines[number - 1].strip() if number > 0 else "end"

    missing = set(part["missing_lines"])
    if missing and not part["executed_lines"]:
        return {where}
    names = {f"{where}: {text(number)}" for number in missing}
    for source, target in part["missing_branches"]:
        if source not in missing and target not in missing:
            names.add(f"{where}: {text(source)} -> {text(target)}")
    return names


def read_list() -> dict[str, str]:
    """Return {name: reason} of the list: a reason is a line that begins with "# ", and its names are below it."""
    reasons: dict[str, str] = {}
    reason = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line.strip():
            assert reason, f"{line} has no reason"
            assert line not in reasons, f"{line} is listed twice"
            reasons[line] = reason
    return reasons


def compare(missing: set[str], listed: set[str]) -> tuple[list[str], list[str]]:
    """Return what never ran and is not listed, and what is listed but ran."""
    doubtful = {name.removeprefix("~ ") for name in listed if name.startswith("~ ")}
    missing = missing - doubtful
    listed = {name for name in listed if not name.startswith("~ ")}
    files = {name for name in listed if " " not in name}
    in_files = {name for name in missing if name.split()[0] in files}
    used = {name.split()[0] for name in in_files}
    unlisted = missing - in_files - listed
    ran = (listed - files - missing) | (files - used)
    return sorted(unlisted), sorted(ran)
