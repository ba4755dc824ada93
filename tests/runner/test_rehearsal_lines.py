"""Every line that only CUDA reaches runs in a rehearsal, or is listed with a reason: see helpers/rehearsal/lines.py."""

from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("coverage")

from helpers.rehearsal import lines


def test_what_never_ran_is_named_by_function_and_text() -> None:
    source = ["def f(x):", "    if x:", "        a()", "    b()", "def g():", "    c()"]
    part = {"executed_lines": [2, 4], "missing_lines": [3], "missing_branches": [[2, 3], [2, -1], [2, 4]]}
    names = lines._name_part("runner/x.py f", part, source)
    assert names == {"runner/x.py f: a()", "runner/x.py f: if x: -> end", "runner/x.py f: if x: -> b()"}
    unused = {"executed_lines": [], "missing_lines": [6], "missing_branches": []}
    assert lines._name_part("runner/x.py g", unused, source) == {"runner/x.py g"}


def test_the_list_must_be_exact() -> None:
    missing = {"runner/x.py f: a()", "runner/x.py g", "kernels/y.py h: b()"}
    assert lines.compare(missing, {"runner/x.py f: a()", "runner/x.py g", "kernels/y.py"}) == ([], [])
    assert lines.compare(missing, {"runner/x.py f", "kernels/y.py", "kernels/z.py"}) == (
        ["runner/x.py f: a()", "runner/x.py g"],
        ["kernels/z.py", "runner/x.py f"],
    )
    assert lines.compare(missing, {"~ runner/x.py f: a()", "~ runner/x.py h", "runner/x.py g", "kernels/y.py"}) == (
        [],
        [],
    )


def test_every_listed_name_has_a_reason_and_is_there() -> None:
    """A line that was changed or removed is no longer in its file."""
    for name in lines.read_list():
        path, _, place = name.removeprefix("~ ").partition(" ")
        source = (lines.ROOT / "nanovllm" / path).read_text()
        for text in place.partition(": ")[2].split(" -> "):
            assert text == "end" or text in source, name


@pytest.mark.longest
@pytest.mark.slow
def test_every_line_runs_or_is_listed(tmp_path: Path) -> None:
    missing = lines.name_missing(lines.measure(tmp_path))
    unlisted, ran = lines.compare(missing, set(lines.read_list()))
    assert not unlisted, "these never ran, and helpers/rehearsal/lines.txt has no reason why:\n" + "\n".join(unlisted)
    assert not ran, "these ran, or are gone; take them out of helpers/rehearsal/lines.txt:\n" + "\n".join(ran)
