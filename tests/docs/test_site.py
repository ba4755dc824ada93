"""The site in a real browser: pages fit, questions answer, and what moves follows the rules of the engine."""

import http.server
import json
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import ROOT

from nanovllm.ops.sample import SamplingValues, filter_reference

GUIDE = ROOT / "docs" / "guide"
HEAD = '<label class="md-header__button" for="__drawer"><svg></svg></label>'
"""The part of the theme's page that site.js looks for."""


def open_page(browser: Any, address: str) -> None:
    """Open a page, and wait until its scripts have run: the last of them names the menu."""
    browser.get(address)
    has_run = "return location.href === arguments[0] && !!document.querySelector('svg[aria-label=Menu]')"
    deadline = time.monotonic() + 60
    while not browser.execute_script(has_run, address):
        assert time.monotonic() < deadline, address
        time.sleep(0.05)


def read_rows() -> list[tuple[str, float]]:
    return [(text, logprob) for text, logprob in json.loads((GUIDE / "logits.json").read_text(encoding="utf-8"))]


@pytest.fixture
def blank(browser: Any, tmp_path: Path) -> Any:
    """A page with the site's script and nothing else."""
    path = tmp_path / "blank.html"
    script = (ROOT / "docs" / "site.js").read_text(encoding="utf-8")
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{HEAD}<script>{script}</script>', encoding="utf-8")
    browser.get(f"file://{path}")
    return browser


def test_the_sliders_of_chapter_7_drop_the_tokens_that_the_sampler_drops(blank: Any) -> None:
    logprobs = [logprob for _, logprob in read_rows()]
    draw = random.Random(7)
    settings = [
        {
            "temperature": draw.choice((0.25, 0.7, 1.0, 2.0)),
            "top-k": draw.choice((1, 3, 5, 50)),
            "top-p": draw.choice((0.05, 0.5, 0.9, 1.0)),
            "min-p": draw.choice((0.0, 0.1, 0.5)),
        }
        for _ in range(40)
    ]
    found = blank.execute_script(
        "return arguments[1].map((one) => filterTokens(arguments[0], one))", logprobs, settings
    )
    for setting, shown in zip(settings, found, strict=True):
        z = (torch.tensor([logprobs], dtype=torch.float64) - logprobs[0]) / setting["temperature"]
        numbers = {name.replace("-", "_"): torch.tensor([number]) for name, number in setting.items()}
        off = dict.fromkeys(SamplingValues._fields, torch.zeros(1))  # what the page has no slider for
        kept = filter_reference(z.float(), SamplingValues(**off | numbers))
        weights = torch.where(kept, z.exp(), 0)
        # torch's float64 and JavaScript's numbers are the same, but for the order of a sum.
        torch.testing.assert_close(
            torch.tensor([shown], dtype=torch.float64), weights / weights.sum(), rtol=1e-9, atol=0
        )


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site."""
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ANSWER = """
return [...document.querySelectorAll("ul.quiz")].map((list) => {
  const said = list.nextElementSibling;
  const answer = said.nextElementSibling.querySelector("strong").textContent[1];
  return [answer, ...[...list.querySelectorAll("input")].map((choice) => { choice.click(); return said.textContent; })];
});
"""


@pytest.mark.slow
def test_each_option_of_a_question_has_its_own_line_and_the_right_one_is_called_right(
    browser: Any, address: str
) -> None:
    for chapter in sorted(GUIDE.glob("[0-9]*.md")):
        open_page(browser, f"{address}/guide/{chapter.stem}/")
        questions = browser.execute_script(ANSWER)
        assert len(questions) == 3
        for answer, *lines in questions:
            assert len({*lines}) == len(lines) == 3 and all(len(line) > 4 for line in lines), chapter
            assert ["abc"[i] for i, line in enumerate(lines) if line.startswith("Right.")] == [answer], chapter


@pytest.mark.slow
def test_the_boxes_of_the_engine_lead_to_their_chapters(browser: Any, address: str) -> None:
    open_page(browser, f"{address}/guide/engine/")
    links = browser.find_elements("css selector", "svg.engine a")
    targets = {link.get_dom_attribute("href") for link in links}
    assert targets == {f"../{chapter.stem}/" for chapter in GUIDE.glob("[0-9]*.md")}


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_pages_fit_their_window_and_words_a_column(browser: Any, address: str, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for page in ("", "readme/", "guide/1-prompt/", "guide/7-sampling/", "guide/engine/", "estimator/", "batch/"):
            open_page(browser, f"{address}/{page}")
            browser.execute_script("document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), page
            widest = browser.execute_script(
                "const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);"
                "const words = [...document.querySelectorAll('.md-typeset p:not(:has(img, svg))')];"
                "return Math.max(...words.map((part) => part.getBoundingClientRect().width / rem));"
            )
            assert widest <= 42, page
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
