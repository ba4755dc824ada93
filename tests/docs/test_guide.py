"""The guide cannot drift from the code: its blocks are run and compared, and its links lead to definitions."""

import ast
import json
import re
import subprocess
import sys
from code import InteractiveConsole
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from helpers.paths import ROOT

from docs.estimator import render_estimator
from docs.guide import from_nothing
from docs.guide.exercises import EXERCISES
from docs.guide.exercises import main as check_answer
from docs.guide.notebooks import CHAPTERS, find_experiments, format_notebook
from docs.guide.notebooks import main as write_notebooks
from nanovllm import LLM, SamplingParams

GUIDE = ROOT / "docs" / "guide"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def type_chapter(chapter: Path) -> list[list[str]]:
    """Type a chapter's blocks into an interactive console, line by line; return the lines that each of them prints.

    The console is Python's own, in this process, which has imported torch already.
    """
    console = InteractiveConsole({"__name__": "__main__"})
    all_printed = []
    said = StringIO()
    for experiment in find_experiments(chapter.read_text()):
        printed = StringIO()
        with redirect_stdout(printed), redirect_stderr(said):
            needs_more = [console.push(line) for line in experiment.code.splitlines()]
        assert not needs_more[-1], f"a block that goes on:\n{experiment.code}"
        all_printed.append(printed.getvalue().splitlines())
    assert "Error" not in said.getvalue() and "Traceback" not in said.getvalue(), said.getvalue()
    return all_printed


def compare(printed: list[str], expected: list[str], code: str) -> None:
    """Line by line; a line that is marked `# varies` (times, rates) is passed over."""
    assert len(printed) == len(expected), f"{code}\nprinted\n" + "\n".join(printed)
    for said, wanted in zip(printed, expected, strict=True):
        assert wanted.endswith("# varies") or said == wanted, f"{code}\nprinted\n" + "\n".join(printed)


def test_there_are_ten_chapters_and_the_first_page_names_them_in_order():
    assert [chapter.name[0] for chapter in CHAPTERS] == list("0123456789")
    assert re.findall(r"\]\((\d-[\w-]+\.md)\)", (GUIDE / "index.md").read_text()) == [c.name for c in CHAPTERS]


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_every_block_of_a_chapter_can_be_pasted_and_prints_what_the_chapter_says(chapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments = find_experiments(chapter.read_text())
    all_printed = type_chapter(chapter)
    exact = 0
    for experiment, printed in zip(experiments, all_printed, strict=True):
        lines = experiment.code.rstrip().splitlines()
        assert len(lines) <= 10 or chapter.name[0] == "0", f"at most ten lines:\n{experiment.code}"
        compare(printed, experiment.printed, experiment.code)
        exact += sum(not line.endswith("# varies") for line in experiment.printed)
    assert exact, "each chapter prints at least one exact line"


def drop_empty_lines(code: str) -> list[str]:
    return [line for line in code.splitlines() if line.strip()]


def test_chapter_0_shows_the_whole_of_its_engine():
    tree = ast.parse((GUIDE / "from_nothing.py").read_text())
    (docstring, *body, main) = tree.body
    assert isinstance(docstring, ast.Expr) and isinstance(main, ast.If)
    lines = (GUIDE / "from_nothing.py").read_text().splitlines()
    text = CHAPTERS[0].read_text().partition("\n## Try it\n")[0]
    shown = [line for experiment in find_experiments(text) for line in drop_empty_lines(experiment.code)]
    assert shown == drop_empty_lines("\n".join(lines[docstring.end_lineno : body[-1].end_lineno]))
    assert len(lines) <= 120
    statements = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    assert len(statements) == len(set(statements)), "one statement a line"


def test_the_engine_from_nothing_says_what_the_real_one_says():
    prompts = ["1 2 3", "tell me a story about a cat", "<|im_start|>user\nwhat is 2 plus 5?<|im_end|>\n<|im_start|>"]
    with LLM("tiny-qwen3", dtype="float32", max_model_len=128) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for output in outputs:
        prompt_ids = list(output["prompt_token_ids"])
        assert from_nothing.generate(prompt_ids, 12) == list(output["token_ids"])
        assert from_nothing.generate_without_cache(prompt_ids, 12) == list(output["token_ids"])


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_a_notebook_has_a_chapter_s_words_code_and_picture(chapter):
    text = chapter.read_text()
    notebook = json.loads(format_notebook(chapter))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    words = [cell for cell in cells if cell["cell_type"] == "markdown"]
    assert len({cell["id"] for cell in cells}) == len(cells) == len(code) + len(words)
    sources = ["".join(cell["source"]) for cell in code]
    assert sources == [experiment.code.rstrip("\n") for experiment in find_experiments(text)]
    for source in sources:
        compile(source, chapter.name, "exec")
    shown = "".join(line for cell in code for output in cell["outputs"] for line in output["text"])
    assert all(line in text for line in shown.splitlines()) and shown
    all_words = "\n\n".join("".join(cell["source"]) for cell in words)
    attached = {name for cell in words for name in cell.get("attachments", {})}
    assert attached and set(re.findall(r"\(attachment:([^)]*)\)", all_words)) == attached
    heading, _, _ = text.partition("\n")
    assert all_words.startswith(heading)


def test_the_command_writes_every_notebook(tmp_path, capsys):
    write_notebooks(["-o", str(tmp_path / "books")])
    written = sorted((tmp_path / "books").iterdir())
    assert [path.stem for path in written] == [chapter.stem for chapter in CHAPTERS]
    assert [path.read_text() for path in written] == [format_notebook(chapter) for chapter in CHAPTERS]
    assert capsys.readouterr().out.split() == [str(path) for path in written]


def test_each_chapter_ends_with_an_exercise_that_a_command_checks():
    assert len(EXERCISES) == len(CHAPTERS)
    for chapter in CHAPTERS:
        _, exercise = chapter.read_text().split("\n## Exercise\n")
        assert f"python -m docs.guide.exercises {chapter.name[0]} " in exercise


@pytest.mark.parametrize("number", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 4, 5, 6, 7, 8, 9))])
def test_an_exercise_accepts_the_right_answer_and_no_other(number, capsys):
    find, hint = EXERCISES[number]
    answer = find()
    assert check_answer([str(number), *answer.split()]) == 0
    assert check_answer([str(number), answer, "1"]) == 1
    assert capsys.readouterr().out == f"Right.\nNot yet. {hint}\n"


def test_shortest_first_breaks_the_order_of_admission_and_nothing_else():
    assert EXERCISES[6][0]() == "order"


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


@pytest.mark.slow
def test_the_site_has_the_guide_first_its_notebooks_and_a_demo(tmp_path):
    pytest.importorskip("material")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    _, front = (tmp_path / "index.html").read_text().split("md-nav--primary", 1)
    assert front.index('href="guide/"') < front.index('href="api/"')
    for chapter in CHAPTERS:
        assert (tmp_path / "guide" / f"{chapter.stem}.ipynb").read_text() == format_notebook(chapter)
        assert f"{chapter.stem}.ipynb" in (tmp_path / "guide" / chapter.stem / "index.html").read_text()
    demo = (tmp_path / "guide" / "demo.html").read_text()
    links = json.loads(re.search(r'"guide":(\{.*?\})', demo)[1])
    assert links and all((tmp_path / "guide" / link / "index.html").is_file() for link in links.values())
    assert 'href="demo.html"' in (tmp_path / "guide" / "index.html").read_text()
    assert render_estimator() in (tmp_path / "estimator" / "index.html").read_text()
