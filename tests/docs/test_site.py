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


def test_the_run_of_the_front_page_has_the_blocks_that_the_engine_counted() -> None:
    from docs.motion import RECORDING, Replay
    from nanovllm.apps.view.page import read_recording

    run = read_recording(RECORDING)
    replay = Replay(run)
    assert len(replay.frames) == run.num_steps
    for frame, used, running in zip(replay.frames, run.charts["used"], run.charts["running"], strict=True):
        assert len(frame.blocks) == run.num_blocks
        assert sum(letter not in "cb" for letter in frame.blocks) == used
        shown = [number for number in frame.answers if number is not None]
        assert len(shown) == len({*shown}) == min(running, len(frame.answers))
    answers = replay.list_answers()
    assert answers[2]["question"] == "tell me a story about a fox and 2 friends"
    for answer in answers.values():
        *_, (_, end) = answer["answer"]
        assert end[-1] in ".0123456789" or len(answer["answer"]) == 80, "it is whole, or as long as it may be"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of the built site."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def emulate(browser: Any, width: int, **features: str) -> None:
    """Give the browser a window of this width, and media features such as prefers_color_scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


@pytest.fixture
def emulated(browser: Any) -> Iterator[Any]:
    """The browser, which forgets afterwards what it emulated."""
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


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
        browser.find_element("css selector", "ul.quiz input").send_keys(" ")
        assert browser.find_element("css selector", "ul.quiz + .said").text, "the keyboard answers, too"
        questions = browser.execute_script(ANSWER)
        assert len(questions) == 3
        for answer, *lines in questions:
            assert len({*lines}) == 3 and all(len(line.split()) > 3 for line in lines), chapter
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
def test_pages_fit_their_window_and_words_a_column(emulated: Any, address: str, width: int, scheme: str) -> None:
    emulate(emulated, width)
    for page in ("", "readme/", "guide/1-prompt/", "guide/7-sampling/", "guide/engine/", "estimator/", "batch/"):
        open_page(emulated, f"{address}/{page}")
        emulated.execute_script("document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme)
        assert emulated.execute_script("return document.documentElement.scrollWidth <= innerWidth"), page
        widest = emulated.execute_script(
            "const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);"
            "const words = [...document.querySelectorAll('.md-typeset p:not(:has(img, svg))')];"
            "return Math.max(...words.map((part) => part.getBoundingClientRect().width / rem));"
        )
        assert widest <= 42, page
    assert not [entry for entry in emulated.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.slow
def test_the_run_of_the_front_page_moves_where_motion_is_wanted_until_a_key_stops_it(
    emulated: Any, address: str
) -> None:
    def read_step() -> str:
        return emulated.find_element("css selector", "#motion .step").text

    emulated.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    emulated.get(f"{address}/")
    still = read_step()
    assert still.startswith("Step 61 of 165: ")
    assert not emulated.find_element("css selector", "#motion button").is_displayed()
    emulated.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

    emulate(emulated, 1280, prefers_reduced_motion="reduce")
    emulated.get(f"{address}/")
    button = emulated.find_element("css selector", "#motion button")
    assert button.text == "Play"
    time.sleep(0.4)
    assert read_step() == still

    emulate(emulated, 1280, prefers_reduced_motion="no-preference")
    emulated.get(f"{address}/")
    button = emulated.find_element("css selector", "#motion button")
    assert button.text == "Pause"
    deadline = time.monotonic() + 60
    while read_step() == still:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    button.send_keys(" ")
    assert button.text == "Play"
    stopped = read_step()
    time.sleep(0.4)
    assert read_step() == stopped


SEARCH = """
const [words, done] = arguments;
const field = document.querySelector("[data-md-component=search-query]");
field.focus();
field.value = words;
field.dispatchEvent(new Event("keyup"));
const wait = () => {
  const shown = document.querySelector(".md-search-result__meta").textContent;
  const first = document.querySelector(".md-search-result__link");
  if (!first || !/\\d/.test(shown)) setTimeout(wait, 50);
  else done(new URL(first.href).pathname);
};
setTimeout(wait, 50);
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("resume a job", "batch"),
        ("KV cache", "guide/4-kv-cache"),
        ("prefix caching", "guide/5-prefixes"),
        ("tensor parallelism", "guide/8-devices"),
        ("structured output", "structured"),
    ],
)
def test_a_search_finds_first_the_page_that_explains_it(browser: Any, address: str, words: str, page: str) -> None:
    open_page(browser, f"{address}/?{page}")
    assert browser.execute_async_script(SEARCH, words) == f"/{page}/"


COLOURS = ["color-contrast", "link-in-text-block"]
WIDTH = ["scrollable-region-focusable"]
SETTINGS = [(1280, "light", None), (1280, "dark", COLOURS), (390, "light", WIDTH), (390, "dark", WIDTH)]
"""Width, scheme, and the rules of axe that are asked; None: all. On the front page and in the window all are, always.

No other rule depends on scheme or width, and the colours of words do not depend on the width.
"""
CHECK = """
const [scheme, rules, done] = arguments;
document.body.dataset.mdColorScheme = scheme === "dark" ? "slate" : "default";
document.documentElement.dataset.theme = scheme;
const options = { resultTypes: ["violations"], preload: false, iframes: false, selectors: false };
if (rules) options.runOnly = { type: "rule", values: rules };
const frame = [".md-header", ".md-sidebar", ".md-footer"].map((part) => [part]);
const part = location.pathname === "/" || location.pathname.endsWith("demo.html") ? document : { exclude: frame };
const tell = ({ violations }) => done(violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]));
const check = () => axe.run(part, options).then(tell, (error) => done([[String(error), []]]));
requestAnimationFrame(() => requestAnimationFrame(check));
"""
"""Shows the page in light or dark, and returns the rules of axe that it breaks, with the parts that break them.

What all pages have alike, the menu above all, is looked at on the front page.
"""


def list_pages(site: Path) -> list[str]:
    """Return the addresses of all pages, but for the pages of code, of which all are made alike: of them one."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    code = [page for page in pages if page.startswith("source/")]
    return [page.removesuffix("index.html") for page in pages if page not in code[1:]]


def use_page(browser: Any, page: str) -> None:
    """Answer the questions of a page, or choose a request of the demo's window."""
    browser.execute_script("document.querySelectorAll('ul.quiz li:first-child input').forEach((one) => one.click())")
    if page.endswith("demo.html"):
        browser.find_element("id", "tour-end").click()
        browser.execute_script("go(60)")
        browser.find_element("id", "request").send_keys("10\n")
        assert browser.find_element("id", "tokens").text


@pytest.mark.slow
def test_no_page_breaks_a_rule_of_axe_at_two_widths_in_light_and_dark(emulated: Any, site: Path, address: str) -> None:
    axe = pytest.importorskip("axe_core_python")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    script = emulated.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    broken = []
    for page in list_pages(site):
        emulated.get(f"{address}/{page}")
        use_page(emulated, page)
        whole = page in ("", "guide/demo.html")
        for width, scheme, rules in SETTINGS:
            emulate(emulated, width, prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
            found = emulated.execute_async_script(CHECK, scheme, None if whole else rules)
            broken += [(page, width, scheme, *rule) for rule in found]
    emulated.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert not broken
