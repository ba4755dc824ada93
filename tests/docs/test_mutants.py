"""scripts/mutants.py makes its changes where every process of the tests meets them."""

import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from scripts import mutants

BOX = "def double(x):\n    return 2 * x\n"
TESTS = """
import os, subprocess, sys
CODE = "import box, sys; sys.exit(box.double(2) != 4)"
def test_a_process_without_a_path():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-P", "-c", CODE], env=environment, cwd="/", check=True)
def test_nothing():
    pass
"""


@pytest.mark.slow
def test_a_change_that_only_another_process_meets_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That process reaches the line, too: no other test has it."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "reached_lines.py").write_text((ROOT / "scripts" / "reached_lines.py").read_text())
    (tmp_path / "box.py").write_text(BOX)
    (tmp_path / "test_box.py").write_text(TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["mutants.py", "box.py", "test_box.py", "--count", "1"])
    assert mutants.main() == 0
    assert capsys.readouterr().out.startswith("box.py:2: noticed: ")
