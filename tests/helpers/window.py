"""Recorded runs of an engine without a model, and their page in a headless browser."""

import random
import shutil
from pathlib import Path
from typing import Any

from helpers.fakes import make_engine, run_all
from nanovllm import SamplingParams
from nanovllm.apps.view.page import write_page


def run_small(path, *, depth=1, num_requests=30, max_tokens=14, num_blocks=14, close=True):
    """A run of the engine without a model, with prefix hits, evictions and preemptions; what each step met."""
    engine = make_engine(
        num_blocks=num_blocks, max_num_seqs=6, max_model_len=40, depth=depth, trace=str(path), eos=frozenset({3})
    )
    met = []
    trace = engine.observers[0]
    planned = trace.planned

    def record(number, at, batch):
        scheduler = engine.scheduler
        manager = scheduler.block_manager
        counts = (len(scheduler.running), len(scheduler.waiting), manager.num_used)
        met.append((*counts, len(manager._evictable), len(manager._blank), batch.plan.num_decodes))
        planned(number, at, batch)

    trace.planned = record
    draw = random.Random(0)
    prompts = [
        [1, 2, 3, 4, 5, 6, 7, 8][: draw.choice((4, 8))] + draw.choices(range(16), k=draw.randint(1, 12))
        for _ in range(num_requests)
    ]
    params = SamplingParams(max_tokens=max_tokens)
    seqs = run_all(engine, (engine.prepare(prompt, params) for prompt in prompts)).values()
    if close:
        engine.close()
    return engine, met, {seq.seq_id: seq for seq in seqs}


def record_a_hundred_thousand_events(path: Path) -> None:
    """Record a run that is longer than a recording may be."""
    run_small(path, num_requests=9000, max_tokens=28, num_blocks=60)


def start_browser() -> Any:
    """Start headless Chromium and return its driver, which the caller quits.

    Raises:
        FileNotFoundError: Chromium or its driver is not installed.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium = shutil.which("chromium")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        raise FileNotFoundError("chromium and chromedriver are not installed (Debian: chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += "disable-component-update disable-sync disable-dev-shm-usage window-size=1400,1000"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_script_timeout(600)
    return driver


# Plays, or jumps about, for 80 frames; the first five are not counted.
FRAMES = """
const done = arguments[arguments.length - 1], times = [], scrub = arguments[0];
let last = performance.now(), turn = 0;
if (!scrub) { document.getElementById("speed").value = "500"; play(); }
const tick = (now) => {
  times.push(now - last); last = now; turn++;
  if (scrub) go((turn * 2654435761) % data.start.length);
  if (turn < 80) requestAnimationFrame(tick); else { pause(); done(times.slice(5)); }
};
requestAnimationFrame(tick);
"""


class Page:
    """The page of a trace, opened."""

    def __init__(self, browser, trace: Path) -> None:
        write_page(trace, trace.with_suffix(".html"))
        self.browser = browser
        browser.get(f"file://{trace.with_suffix('.html')}")
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)
        self.settle()

    def click(self, name: str) -> None:
        self.browser.find_element("id", name).click()
        self.settle()

    def text(self, name: str) -> str:
        return self.browser.find_element("id", name).get_property("textContent")

    def number(self, name: str) -> int:
        return int(self.text(name).replace(",", ""))

    def errors(self) -> list[dict]:
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def time_frames(self, scrubs: bool) -> list[float]:
        """Return the milliseconds of 75 frames while the page plays, or while it jumps from step to step."""
        times: list[float] = self.browser.execute_async_script(FRAMES, scrubs)
        return times
