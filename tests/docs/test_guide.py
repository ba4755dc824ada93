"""The guide cannot drift from the code: its blocks are run and compared, and its links lead to definitions."""

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest
from helpers.paths import ROOT

GUIDE = ROOT / "docs" / "guide"
CHAPTERS = sorted(GUIDE.glob("[1-9]-*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def blocks_of(chapter: Path) -> list[tuple[str, list[str]]]:
    """(code, the lines it prints) of each experiment."""
    blocks: list[tuple[str, list[str]]] = []
    for language, text in BLOCK.findall(chapter.read_text()):
        if language == "python":
            blocks.append((text, []))
        else:
            assert language == "text" and not blocks[-1][1], "a text block is what the block before it prints"
            blocks[-1] = (blocks[-1][0], text.splitlines())
    return blocks


def compare(printed: list[str], expected: list[str], code: str) -> None:
    """Line by line; a line that is marked `# varies` (times, rates) is passed over."""
    assert len(printed) == len(expected), f"{code}\nprinted\n" + "\n".join(printed)
    for said, wanted in zip(printed, expected, strict=True):
        assert wanted.endswith("# varies") or said == wanted, f"{code}\nprinted\n" + "\n".join(printed)


def test_there_are_nine_chapters_and_the_first_page_names_them_in_order():
    assert [chapter.name[0] for chapter in CHAPTERS] == list("123456789")
    assert re.findall(r"\]\((\d-[\w-]+\.md)\)", (GUIDE / "index.md").read_text()) == [c.name for c in CHAPTERS]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_every_block_of_a_chapter_prints_what_the_chapter_says(chapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "guide"}
    exact = 0
    for code, expected in blocks_of(chapter):
        assert len(code.splitlines()) <= 10, f"an experiment has at most ten lines:\n{code}"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, chapter.name, "exec"), names)
        compare(printed.getvalue().splitlines(), expected, code)
        exact += sum(not line.endswith("# varies") for line in expected)
    assert exact, "each chapter prints at least one exact line"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_a_chapter_is_a_page_with_a_picture_and_places_in_the_code(chapter):
    text = chapter.read_text()
    links = LINK.findall(text)
    assert 300 <= len(BLOCK.sub("", text).split()) <= 900
    assert [target for image, target in links if image and target.endswith((".svg", ".png"))]
    assert sum("nanovllm/" in target and "#" in target for _, target in links) >= 3


def defined_in(path: Path) -> set[str]:
    """The classes, functions, methods, attributes and constants that a file of the package defines, by dotted name."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def headings_of(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_every_symbol_to_its_definition(page):
    for _, target in LINK.findall(BLOCK.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        name, _, symbol = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists() and path.is_relative_to(ROOT), f"{page.name} links to {target}"
        if symbol and path.suffix == ".py":
            assert symbol in defined_in(path), f"{page.name} links to {target}, which is not defined there"
        if symbol and path.suffix == ".md":
            assert symbol in headings_of(path), f"{page.name} links to {target}, and there is no such heading"


@pytest.mark.slow
def test_every_picture_of_the_guide_is_drawn_by_one_command(tmp_path):
    pytest.importorskip("matplotlib")
    from docs.guide import draw

    draw.main(["-o", str(tmp_path), *draw.PICTURES])
    pictures = {
        target
        for chapter in CHAPTERS
        for image, target in LINK.findall(chapter.read_text())
        if image and "/" not in target
    }
    assert {path.name for path in tmp_path.iterdir()} == pictures
    assert all((GUIDE / picture).is_file() for picture in pictures)


def test_every_path_that_a_page_for_contributors_names_exists():
    """A name in backticks that ends in a suffix or a slash is a path: from the root, from nanovllm/ or from docs/."""
    missing = []
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        for name in re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", (ROOT / page).read_text()):
            if not any((ROOT / folder / name).exists() for folder in ("", "nanovllm", "docs", "tests")):
                missing.append((page, name))
    assert not missing
