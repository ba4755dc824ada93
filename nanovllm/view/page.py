"""Writes a run as one page: a template, a style sheet, a script and the data, with nothing to fetch."""

import json
from importlib.resources import files
from pathlib import Path

from nanovllm.view.run import Run, read_run


def write_page(trace: Path, output: Path) -> Run:
    """Write the page of a trace; returns the run that it shows.

    Raises:
        ValueError: the trace cannot be read, or the page cannot be written.
    """
    run = read_run(trace)
    page = render_page(run, trace.name)
    try:
        if output.exists() and output.samefile(trace):
            raise ValueError(f"-o {output} is the trace itself: name another file for the page")
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"-o {output} cannot be written: {error}") from error
    return run


def render_page(run: Run, title: str) -> str:
    """The page's HTML. What a run brings along (prompts, a file's name) is text to the page and never markup."""
    data = json.dumps({"title": title, **vars(run)}, separators=(",", ":"))
    room = files("nanovllm.view")
    parts = {
        "/* style */": room.joinpath("page.css").read_text(encoding="utf-8"),
        "/* script */": room.joinpath("page.js").read_text(encoding="utf-8"),
        "/* data */": data.replace("<", "\\u003c"),
    }
    page = room.joinpath("page.html").read_text(encoding="utf-8")
    for place, text in parts.items():
        before, after = page.split(place)
        page = before + text + after
    return page
