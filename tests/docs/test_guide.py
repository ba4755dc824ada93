"""The guide cannot drift from the code: its blocks are run and compared, and its links lead to definitions."""

import ast
import json
import os
import re
import subprocess
import sys
from code import InteractiveConsole
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from helpers.paths import ROOT

from docs.estimator import render_estimator
from docs.guide import big_picture, from_nothing
from docs.guide.exercises import EXERCISES, shortest_first
from docs.guide.exercises import main as check_answer
from docs.guide.notebooks import CHAPTERS, INSTALL, find_experiments, format_notebook
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


def number_of(chapter: Path) -> int:
    return int(chapter.name.partition("-")[0])


def test_there_are_eleven_chapters_and_the_first_page_and_the_menu_begin_with_chapter_1():
    assert [number_of(chapter) for chapter in CHAPTERS] == list(range(11))
    in_order = [chapter.name for chapter in (*CHAPTERS[1:], CHAPTERS[0])]
    assert re.findall(r"\]\((\d+-[\w-]+\.md)\)", (GUIDE / "index.md").read_text()) == in_order
    assert re.findall(r"- guide/(\d+-[\w-]+\.md)", (ROOT / "mkdocs.yml").read_text()) == in_order


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_every_block_of_a_chapter_can_be_pasted_and_prints_what_the_chapter_says(chapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments = find_experiments(chapter.read_text())
    all_printed = type_chapter(chapter)
    exact = 0
    for experiment, printed in zip(experiments, all_printed, strict=True):
        lines = experiment.code.rstrip().splitlines()
        assert len(lines) <= 10 or number_of(chapter) == 0, f"at most ten lines:\n{experiment.code}"
        compare(printed, experiment.printed, experiment.code)
        exact += sum(not line.endswith("# varies") for line in experiment.printed)
    assert exact, "each chapter prints at least one exact line"
    assert [*tmp_path.iterdir()] == [], "a reader may sit in the checkout"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_no_block_leaves_the_next_prompt_in_its_line_of_output(chapter):
    """In a terminal, Python writes `>>>` after what a statement prints, also if that does not end its line."""
    for experiment in find_experiments(chapter.read_text()):
        for node in ast.parse(experiment.code).body:
            call = getattr(node, "value", None)
            ends = [key.arg for key in call.keywords] if isinstance(call, ast.Call) else []
            assert "end" not in ends, f"print on one line:\n{experiment.code}"


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
    install, *sources = ["".join(cell["source"]) for cell in code]
    assert cells[0] is code[0] and install == INSTALL.rstrip("\n")
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
    assert not re.search(r"\]\((?!https?:|attachment:)", all_words), "a file of the repository is not beside a notebook"


@pytest.mark.slow
def test_the_notebook_of_chapter_0_stands_alone(tmp_path):
    """Its cells run in an empty folder, with the package and nothing else of the project."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "nanovllm").symlink_to(ROOT / "nanovllm")
    (tmp_path / "empty").mkdir()
    notebook = json.loads(format_notebook(CHAPTERS[0]))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][1:]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = [line for cell in cells for output in cell["outputs"] for line in "".join(output["text"]).splitlines()]
    compare(done.stdout.splitlines(), wanted, "chapter 0")


def test_the_command_writes_every_notebook(tmp_path, capsys):
    write_notebooks(["-o", str(tmp_path / "books")])
    written = sorted((tmp_path / "books").iterdir(), key=number_of)
    assert [path.stem for path in written] == [chapter.stem for chapter in CHAPTERS]
    assert [path.read_text() for path in written] == [format_notebook(chapter) for chapter in CHAPTERS]
    assert capsys.readouterr().out.split() == [str(path) for path in written]


def test_each_chapter_ends_with_an_exercise_that_a_command_checks():
    assert len(EXERCISES) == len(CHAPTERS)
    for chapter in CHAPTERS:
        _, exercise = chapter.read_text().split("\n## Exercise\n")
        assert f"python -m docs.guide.exercises {number_of(chapter)} " in exercise


ENDING = re.compile("\n## What many get wrong\n(.*)\n## Three questions\n(.*)\n## What you can do now\n(.*)", re.S)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_a_chapter_ends_with_mistakes_questions_and_what_the_reader_can_do(chapter):
    wrong, questions, abilities = ENDING.search(chapter.read_text()).groups()
    assert 2 <= len(re.findall(r'^\* \*\*"', wrong, re.M)) <= 5
    parts = re.split(r"^\*\*\d\.\*\* ", questions, flags=re.M)[1:]
    assert len(parts) == 3
    for part in parts:
        choices = re.findall(r"^\* \((\w)\) ", part, re.M)
        (right,) = re.findall(r"\n\*\*\((\w)\)\.\*\* (?!Not\s\()", part)
        explained = re.findall(r"Not\s\((\w)\):\s", part)
        assert sorted([right, *explained]) == choices, "the answer explains every choice"
        assert part.count("<details") == part.count("</details>") == 1
    assert len(re.findall(r"^\* ", abilities, re.M)) >= 3


LEARNED = [*CHAPTERS, *(GUIDE / name for name in ("index.md", "engine.md", "terms.md", "map.md", "../estimator.md"))]


@pytest.mark.parametrize("page", LEARNED, ids=lambda page: page.stem)
def test_a_page_says_first_what_the_reader_can_do_after_it(page):
    _, *paragraphs = page.read_text().split("\n\n")
    start = re.compile(r"After (this chapter|this page|these chapters) you can ")
    assert any(start.match(paragraph) for paragraph in paragraphs[:2])


def test_right_answers_stand_at_every_place_and_a_place_says_nothing_of_the_next():
    rights = [re.findall(r"^\*\*\((\w)\)\.\*\*", chapter.read_text(), re.M) for chapter in CHAPTERS]
    assert min(sum(three.count(letter) for three in rights) for letter in "abc") >= 8
    assert 3 <= sum(len(set(three)) < 3 for three in rights) <= 9


@pytest.mark.parametrize("chapter", CHAPTERS[1:], ids=lambda chapter: chapter.stem)
def test_a_reader_tries_it_before_the_code_is_named(chapter):
    headings = re.findall(r"^## (.*)$", BLOCK.sub("", chapter.read_text()), re.M)
    tried = next(heading for heading in ("Try it", "Break it") if heading in headings)
    assert headings.index(tried) < headings.index("In the code")


SLOW_EXERCISES = (0, 1, 4, 5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize("number", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_EXERCISES)])
def test_an_exercise_accepts_the_right_answer_and_no_other(number, capsys):
    find, hint = EXERCISES[number]
    answer = find()
    assert check_answer([str(number), *answer.split()]) == 0
    assert check_answer([str(number), answer, "1"]) == 1
    assert capsys.readouterr().out == f"Right.\nNot yet. {hint}\n"


def test_shortest_first_breaks_the_order_of_admission_and_nothing_else():
    assert EXERCISES[6][0]() == "order"
    with shortest_first():  # the reader's change is still there
        assert EXERCISES[6][0]() == "order"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_a_chapter_is_a_page_with_a_picture_and_places_in_the_code(chapter):
    text = chapter.read_text()
    links = LINK.findall(text)
    body, _, ending = BLOCK.sub("", text).partition("\n## What many get wrong\n")
    assert 300 <= len(body.split()) <= 1150 and len(ending.split()) <= 450
    pictures = [target for image, target in links if image and target.endswith((".svg", ".png"))]
    assert pictures[0] == f"where-{number_of(chapter)}.svg" and len(pictures) >= 2
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


def read_rows(page: str, columns: int) -> list[list[str]]:
    """Return the cells of a page's table, without its head."""
    lines = [line for line in (GUIDE / page).read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    assert all(len(row) == columns for row in rows)
    return rows


def test_the_map_has_25_rows_with_a_definition_of_ours():
    rows = read_rows("map.md", 5)
    assert [row[0] for row in rows] == [str(n) for n in range(1, 26)]
    for _, _, ours, theirs, vllm in rows:
        (path,) = {target.partition("#")[0] for _, target in LINK.findall(ours)}
        assert ours.startswith(f"`{path.removeprefix('../../nanovllm/')}`: [")
        assert theirs and re.match(r"`(v1|model_executor|distributed|entrypoints)/[\w/]+\.py`", vllm)


NAMED = "PagedAttention|continuous batching|chunked prefill|prefix caching|speculative decoding|tensor parallelism"
NAMED += "|pipeline parallelism|data parallelism|CUDA graph|quantisation"


def test_each_term_of_the_index_is_named_in_its_chapter_with_its_paper():
    rows = read_rows("terms.md", 4)
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), key=str.lower)
    assert set(NAMED.split("|")) <= {row[0] for row in rows}
    for term, _, chapter, paper in rows:
        text = " ".join((GUIDE / LINK.search(chapter)[2]).read_text().split())
        assert term.partition(",")[0].lower() in text.lower(), term
        assert paper.partition(":")[0] in text, f"{term} without {paper}"
        assert bool(paper) == bool(LINK.search(paper))


def test_the_big_picture_has_the_names_and_the_numbers_of_today():
    for part in big_picture.PARTS.values():
        path, _, symbol = part.symbol.partition("#")
        assert symbol in defined_in(ROOT / path), f"the picture names {part.symbol}"
    explained = {chapter for part in big_picture.PARTS.values() for chapter in part.chapters}
    assert explained == {number_of(chapter) for chapter in CHAPTERS}
    assert (GUIDE / "engine.svg").read_text() == big_picture.draw_engine(big_picture.run_step()), (
        "run python -m docs.guide.draw engine"
    )
    for chapter in explained:
        assert (GUIDE / f"where-{chapter}.svg").read_text() == big_picture.draw_place(chapter)


def test_no_picture_has_text_below_11_pixels():
    """matplotlib writes the size of text as the scale of its glyphs, which are 100 high, in points of 4/3 pixels.

    An exponent has a scale of its own inside that.
    """
    for picture in sorted((ROOT / "docs").rglob("*.svg")):
        text = picture.read_text()
        smaller = min([1.0, *map(float, re.findall(r"\) scale\(([\d.]+)\)", text))])
        points = [smaller * float(scale) * 100 for scale in re.findall(r"scale\(([\d.]+) -\1\)", text)]
        sizes = [float(size) for size in re.findall(r'font-size[=:]\s*"?([\d.]+)', text)]
        assert points or sizes, picture.name
        assert min([*(size * 4 / 3 for size in points), *sizes]) >= 11, picture.name


SKETCHES = {"experts.svg", "kitchen.svg", "ladder.svg"}
"""Pictures of an idea. They are written by hand, because they show no run."""


@pytest.mark.slow
def test_every_picture_of_the_guide_that_shows_a_run_is_drawn_by_one_command(tmp_path, monkeypatch):
    """The times of a gigabyte of weights are measured with two layers, and once."""
    pytest.importorskip("matplotlib")
    from docs.guide import draw

    monkeypatch.setitem(draw.PICTURES, "3-memory", partial(draw.memory, num_layers=2, num_rounds=1))
    draw.main(["-o", str(tmp_path), *draw.PICTURES, "engine"])
    pictures = {
        target
        for page in (*CHAPTERS, GUIDE / "engine.md")
        for image, target in LINK.findall(page.read_text())
        if image and "/" not in target
    }
    assert {path.name for path in tmp_path.iterdir()} == pictures - SKETCHES
    assert pictures > SKETCHES
    assert all((GUIDE / picture).is_file() for picture in pictures)


def test_every_path_that_a_page_for_contributors_names_exists():
    """A name in backticks that ends in a suffix or a slash is a path, from the root or one of a few folders."""
    package = ("nanovllm", "nanovllm/features", "nanovllm/features/families", "nanovllm/apps")
    folders = ("", "docs", "tests", *package)
    missing = []
    for page in ("CONTRIBUTING.md", "docs/architecture.md", "docs/recipes.md"):
        for name in re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", (ROOT / page).read_text()):
            if not any((ROOT / folder / name).exists() for folder in folders):
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
    for page in tmp_path.rglob("*.html"):
        check_names(page.read_text(), page.relative_to(tmp_path))
    check_links_to_code(tmp_path / "guide" / "map" / "index.html", 27)
    check_links_to_code(tmp_path / "guide" / CHAPTERS[1].stem / "index.html", 11)


def check_names(html: str, page: Path) -> None:
    """A screen reader has words for whatever it announces."""
    assert '<html lang="en"' in html, page
    assert "<th></th>" not in html and not re.search(r"<a [^>]*></a>", html), page
    assert all(re.search(r' alt="[^"]', picture) for picture in re.findall(r"<img [^>]*>", html)), page
    assert all("aria-label=" in dialog for dialog in re.findall(r'<[^>]* role="dialog"[^>]*>', html)), page


def check_links_to_code(page: Path, number: int) -> None:
    """Each leads to the line that defines the symbol of its words."""
    links = re.findall(r'href="([^"]*/source/[^"]*)#(line-\d+)"><code>(?:\w+\.)*(\w+)</code>', page.read_text())
    assert len(links) == number
    for target, anchor, name in links:
        lines = (page.parent / target).resolve().read_text().splitlines()
        (line,) = [re.sub("<[^>]*>", "", line) for line in lines if f'id="{anchor}"' in line]
        assert re.match(rf"\s*(class |def |){name}\b", line), f"{target}#{anchor}: {line}"
