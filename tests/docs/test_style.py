"""Habits that make code slow to read stay out, and the lines that pages count are there."""

import re

import pytest
from helpers.paths import ROOT

from scripts.check_code import (
    FOLDERS,
    count_places,
    find_habits,
    find_imports,
    find_modules,
    python_files,
    python_lines,
)

FINE = """
rows, ends = plan(batch)
a, b = b, a
a, b = b, a + b
x[i], x[j] = x[j], x[i]
self.first, count = count, self.first
for name, value in ((1, 2), (3, 4)):
    pass
pair = 1, 2
def of(x):
    "Whatever it is."
"""


def test_unpacking_swaps_and_updates_are_no_habit() -> None:
    assert list(find_habits(FINE)) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a, b = 1, 2", "unrelated"),
        ("a, b = x, x", "unrelated"),
        ("self.closed, self.identity = False, object()", "unrelated"),
        ("a, b = a + 1, b + 1", "unrelated"),
        ("a, (b, c) = 1, (2, 3)", "unrelated"),
        ("a, b = pair = 1, 2", "unrelated"),
        ("def f():\n    with x:\n        a, b = 1, 2", "unrelated"),
        ('"""What it is."""', "What"),
        ('class A:\n    """What\'s in it."""', "What"),
        ('class A:\n    x: int\n    """What x is."""', "What"),
        ("def of_step(x):\n    pass", "of_step"),
        ("class A:\n    def _of_step(x):\n        pass", "of_step"),
    ],
)
def test_habits_are_found(source: str, complaint: str) -> None:
    ((_, found),) = find_habits(source)
    assert complaint in found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_has_the_habits(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {complaint}"
        for path in python_files([ROOT / folder])
        for line, complaint in find_habits(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_tests_readme_names_every_test_file_and_no_other() -> None:
    page = (ROOT / "tests" / "README.md").read_text()
    files = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"`([a-z]+/test_\w+\.py)`", page)) == files


def test_no_test_file_imports_from_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) test_", path.read_text(), re.MULTILINE), path.name


def test_the_figures_of_the_comparison_are_those_of_check_code() -> None:
    """Quoted figures are rounded, so they are right to one percent."""
    page = (ROOT / "docs" / "compare.md").read_text()
    (row,) = re.findall(r"^\| lines of Python code \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    quoted = [int(figure.replace(",", "")) for figure in re.findall(r"\d[\d,]+", row)]
    spine, rest, others = count_places(ROOT / "nanovllm")
    page_of_view = others["JavaScript"] + others["HTML"] + others["CSS"]
    counted = [spine.total() + rest.total(), spine.total(), others["C++"], page_of_view]
    assert quoted == pytest.approx(counted, rel=0.01)


def test_the_reading_list_of_the_readme_has_the_size_that_is_quoted() -> None:
    """Its files, their lines of code to three percent, and the other files that they import, to two."""
    page = (ROOT / "README.md").read_text()
    (paragraph,) = re.findall(r"^\*\*Read these .*?\n\n", page, re.MULTILINE | re.DOTALL)
    files = [ROOT / name for name in re.findall(r"\((nanovllm/[\w/]+\.py)\)", paragraph)]
    modules = find_modules(ROOT / "nanovllm")
    imported = {modules[found.module] for file in files for found in find_imports(file, modules)}
    num_files, num_lines, num_others = (int(n.replace(",", "")) for n in re.findall(r"\b(\d[\d,]*)\b", paragraph))
    assert num_files == len(files)
    assert num_lines == pytest.approx(sum(python_lines(file.read_text()) for file in files), rel=0.03)
    assert num_others == pytest.approx(len(imported - set(files)), abs=2)


def test_every_kernel_names_a_reference_that_exists() -> None:
    backends = ROOT / "nanovllm" / "backends"
    found: set[str] = set()
    for path in sorted(backends.glob("[cg]pu/*.*")):
        source = path.read_text()
        text = re.sub(r"\s*\n(// )?", " ", source)
        named = re.findall(r"reference(?: is|s are) ((?:`\w+`(?: and )?)+) in ([\w/]+\.py)", text)
        for names, place in named:
            for name in re.findall(r"\w+", names.replace(" and ", " ")):
                assert re.search(rf"^(def|class) {name}\b", (ROOT / "nanovllm" / place).read_text(), re.MULTILINE), name
                found.add(name)
        has_kernels = re.search(r"^def _\w+_kernel\(|^EXPORT\w*\(", source, re.MULTILINE)
        assert named or not has_kernels, f"{path} names no reference of its kernels"
    kernels = set(re.findall(r"^EXPORT\((\w+)", (backends / "cpu" / "kernels.cpp").read_text(), re.MULTILINE))
    assert {f"{kernel}_reference" for kernel in kernels - {"linear", "add_rms_norm"}} <= found
