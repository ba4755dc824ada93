"""Hooks of mkdocs: add the pages of the project's root to the site, write links that leave it, and list the options.

The README becomes a page, and so does each file of code or figures to which a page links: a link to code leads to the
definition. The project has no address of its own yet, so a link to any other file has no target: its words stay.
"""

import ast
import json
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path, PurePosixPath
from posixpath import relpath
from typing import Any

from mkdocs.structure.files import File, Files
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import JsonLexer, PythonLexer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
PAGES = {"README.md": "readme.md", **{f"{name}.md": f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}}
"""Files of the project's root that are pages, and their names on the site."""
OPTIONS = "<!-- the options -->"
"""Where docs/api.md lists the options."""
DEMO = "<!-- the demo -->"
"""Where the front page and the guide's first page link to the demo, a page that only the site has."""
ESTIMATOR = "<!-- the estimator -->"
"""Where docs/estimator.md has its controls. They need a script, so only the site has them."""
LISTS = ("api.md", "CHANGELOG.md", "tried.md", "guide/map.md", "guide/terms.md")
"""Pages that name everything once. A search finds the page that explains a thing before them."""
PLAYGROUND = "<!-- the playground -->"
"""Where chapter 7 has sliders for temperature and filters. They need a script, so only the site has them."""
MOTION = "<!-- the run -->"
"""Where the front page shows a run in motion."""
PICTURE = re.compile(r'<img alt="([^"]*)" src="[^"]*engine\.svg"\s*/?>')
LEXERS = {".py": PythonLexer(), ".json": JsonLexer()}
"""Of the files that become pages, by their suffix."""
SOURCE_HEAD = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
"""
SOURCE_STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ margin: 1rem; background: #ffffff; color: #16191d; font-family: sans-serif; }}
h1 {{ font-size: 1.1rem; overflow-wrap: anywhere; }}
pre {{ font-size: 13px; line-height: 1.4; overflow-x: auto; }}
span:target::before {{ content: "\\25b8 "; color: #d55e00; }}
{HtmlFormatter(style="default").get_style_defs(".highlight")}
@media (prefers-color-scheme: dark) {{
body {{ background: #0d1117; color: #e6edf3; }}
{HtmlFormatter(style="github-dark").get_style_defs(".highlight")}
}}
"""
"""The look of a page of code."""
EVENT_CHAPTERS = {
    "preemption": "6-scheduler",
    "queue": "6-scheduler",
    "hit": "5-prefixes",
    "eviction": "5-prefixes",
}
"""The chapter of the guide that explains each kind of event."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root. mkdocs calls it with the files of docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=rewrite_links(text, ROOT, PurePosixPath(page).parent)))
    add_demo(files, config)
    add_notebooks(files, config)
    add_sources(files, config)
    return files


def add_demo(files: Files, config: Any) -> None:
    """Add the window of the run that docs/guide/demo.json recorded (python -m docs.guide.draw demo)."""
    from nanovllm.apps.view.page import read_recording, render_page

    guide = {kind: f"{chapter}/" for kind, chapter in EVENT_CHAPTERS.items()}
    recording = read_recording(ROOT / "docs" / "guide" / "demo.json")
    page = render_page(recording, "48 chats in a cache that is too small", guide)
    files.append(File.generated(config, "guide/demo.html", content=page))


def add_notebooks(files: Files, config: Any) -> None:
    """Add each chapter of the guide as a notebook."""
    from docs.guide.notebooks import CHAPTERS, format_notebook

    for chapter in CHAPTERS:
        name = f"guide/{chapter.stem}.ipynb"
        files.append(File.generated(config, name, content=format_notebook(chapter)))


def add_sources(files: Files, config: Any) -> None:
    """Add a page of each file of code or figures to which a page links. Its lines have anchors: line-1, ..."""
    pages = [ROOT / name for name in PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in pages
        for _, _, target in LINK.findall(page.read_text(encoding="utf-8"))
    }
    for path in sorted(path for path in linked if path.suffix in LEXERS and path.is_relative_to(ROOT)):
        name = path.relative_to(ROOT).as_posix()
        code = highlight(path.read_text(encoding="utf-8"), LEXERS[path.suffix], HtmlFormatter(lineanchors="line"))
        code = re.sub(r'<a id="(line-\d+)"[^>]*></a>', r'<span id="\1"></span>', code)  # not a link without words
        code = code.replace("<pre>", '<pre tabindex="0">', 1)  # the arrow keys scroll it
        page = f"{SOURCE_HEAD}<title>{name}</title><style>{SOURCE_STYLE}</style><main><h1>{name}</h1>{code}</main>"
        files.append(File.generated(config, name_source(path), content=page))


def name_source(path: Path) -> str:
    """Return where the page of a file of code or figures lies on the site."""
    return f"source/{path.relative_to(ROOT).as_posix()}.html"


def find_line(path: Path, symbol: str) -> int:
    """Return the line of a file on which a symbol is defined, a dotted name.

    Raises:
        ValueError: it is not defined there.
    """
    scope: Any = ast.parse(path.read_text(encoding="utf-8"))
    for name in symbol.split("."):
        found = [node for node in scope.body if name in names_of(node)]
        if not found:
            raise ValueError(f"{path} does not define {symbol}")
        scope = found[0]
    return int(scope.lineno)


def names_of(node: Any) -> list[str]:
    """Return the names that a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [getattr(node, "name", ""), *(getattr(target, "id", "") for target in targets)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/. mkdocs calls it for every page; those of the root are done already."""
    name = page.file.src_uri
    if name in LISTS:
        page.meta["search"] = {"boost": 0.3}
    if name in PAGES.values():
        return markdown
    if re.match(r"guide/\d", name):
        notebook = PurePosixPath(name).with_suffix(".ipynb").name
        markdown += f"\n[Download this chapter as a notebook]({notebook}){{ download }}\n"
    markdown = markdown.replace(OPTIONS, list_options())
    markdown = rewrite_links(markdown, (ROOT / "docs" / name).parent, PurePosixPath(name).parent)
    demo = relpath("guide/demo.html", PurePosixPath(name).parent)
    return markdown.replace(DEMO, f"[Look at a ready run]({demo}) now; nothing needs to be installed.")


def on_page_content(html: str, **_: Any) -> str:
    """Put the estimator, the playground, the run and the engine's picture into their pages.

    mkdocs calls it for every page, after it has made HTML of it.

    A heading of a column without words becomes an empty cell: a screen reader would announce a heading without a name.
    """
    from docs.estimator import render_estimator
    from docs.motion import render_motion

    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    html = PICTURE.sub(inline_engine, html)
    html = html.replace(PLAYGROUND, render_playground())
    html = html.replace(MOTION, render_motion("guide/demo.html")) if MOTION in html else html
    return html.replace(ESTIMATOR, render_estimator()) if ESTIMATOR in html else html


def inline_engine(image: re.Match[str]) -> str:
    """Return the picture of the engine as a part of the page, so that its boxes open their chapters."""
    picture = (ROOT / "docs" / "guide" / "engine.svg").read_text(encoding="utf-8")
    picture = re.sub(r'href="([\w-]+)\.md"', r'href="../\1/"', picture)
    return picture.replace("<svg ", f'<svg class="engine" role="group" aria-label="{image[1]}" ', 1)


def render_playground() -> str:
    """Return the place of the sliders of chapter 7, with the probabilities that they change."""
    rows = json.loads((ROOT / "docs" / "guide" / "logits.json").read_text(encoding="utf-8"))
    data = json.dumps(rows).replace("<", "\\u003c")
    return f'<div id="playground"></div><script type="application/json" id="logits">{data}</script>'


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search for screen readers. mkdocs calls it for every page, when it is complete."""
    return output.replace(' role="dialog"', ' role="dialog" aria-label="Search"')


on_post_template = on_post_page  # the page of a missing address


def rewrite_links(text: str, folder: Path, site_folder: PurePosixPath) -> str:
    """Return text in which links to pages and to code lead to their places on the site, and others are words alone.

    Args:
        folder: where the links of the text start.
        site_folder: where the page lies on the site.
    """

    def rewrite(link: re.Match[str]) -> str:
        image, words, target = link.groups()
        name, _, symbol = target.partition("#")
        if not name or "://" in target:
            return link[0]
        path = (folder / name).resolve()
        anchor = f"#{symbol}" if symbol else ""
        if path.parent == ROOT and path.name in PAGES:
            return f"{image}[{words}]({relpath(PAGES[path.name], site_folder)}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            on_site = path.relative_to(ROOT / "docs").as_posix()
            return f"{image}[{words}]({relpath(on_site, site_folder)}{anchor})"
        if path.suffix in LEXERS:
            line = f"#line-{find_line(path, symbol)}" if symbol else ""
            return f"[{words}]({relpath(name_source(path), site_folder)}{line})"
        return words

    return LINK.sub(rewrite, text)


def list_options() -> str:
    """Return a table of the engine's options: name, type, default and help."""
    from nanovllm.config import EngineConfig

    rows = ["| option | type | default | |", "| --- | --- | --- | --- |"]
    for option in fields(EngineConfig):
        default = "" if option.default is MISSING else f"`{option.default!r}`"
        kind = option.type.__name__ if isinstance(option.type, type) else str(option.type)
        kind = kind.replace("collections.abc.", "").replace("typing.", "")
        words = option.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{option.name}` | `{kind}` | {default} | {words} |")
    return "\n".join(rows)
