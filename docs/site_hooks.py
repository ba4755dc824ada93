"""For mkdocs: takes the README in as the first page, and writes links that leave docs/ as path#symbol.

The project has no address of its own yet, so there is nothing that such a link could lead to.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as index.md; its links are those of a page of docs/, once they lose that folder's name."""
    text = LINK.sub(lambda link: f"{link[1]}[{link[2]}]({_from_docs(link[3])})", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to what is not of the site into the path and the symbol that they mean."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def write(link: re.Match[str]) -> str:
        name, _, symbol = link[3].partition("#")
        target = (folder / name).resolve()
        if not name or "://" in link[3] or target.is_relative_to(ROOT / "docs"):
            return link[0]
        place = f"`{target.relative_to(ROOT)}{'#' + symbol if symbol else ''}`"
        return place if link[2].strip("`") in place else f"{link[2]} ({place})"

    return LINK.sub(write, markdown)


def _from_docs(target: str) -> str:
    if target.startswith("#") or "://" in target:
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
