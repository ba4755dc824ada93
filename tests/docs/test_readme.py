"""The README stays short, and begins with what a newcomer runs."""

import re

from helpers.paths import ROOT

README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_shows_python_first() -> None:
    assert len(README.split()) <= 750
    assert README[: README.index("```python")].count("\n") + 1 < 25


def test_the_first_block_of_the_readme_has_the_two_commands_that_are_run_before_a_change_lands() -> None:
    first = re.search(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].split("&& ")[1].strip() for line in first[1].splitlines()] == [
        "python example.py",
        "python -m pytest",
    ]


def test_the_front_page_of_the_site_shows_the_example_of_the_readme_and_its_output() -> None:
    example = re.search(r"^```python\n.*?^```$\n\n^```text\n.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert example is not None and example[0] in (ROOT / "docs" / "index.md").read_text()
