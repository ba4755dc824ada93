"""The trace and the window: what a page shows is what the engine did, in a real browser."""

import itertools
import json
import os
import random
import time

import pytest
from helpers.fakes import FakeRunner, make_engine, run_all
from helpers.window import Page, record_a_hundred_thousand_events, run_small, start_browser

from nanovllm import LLM, SamplingParams
from nanovllm.cli import main
from nanovllm.view import trace as trace_module
from nanovllm.view.page import read_recording, render_page, write_page

HOSTILE = "</script><img src=x onerror=document.title='owned'><!--<script>"
ROOM = {"num_kvcache_blocks": 24, "kvcache_block_size": 16, "max_model_len": 192, "max_num_batched_tokens": 64}


# ---- runs to look at


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trace_tells_every_token_and_ending_of_every_request(tmp_path, depth):
    engine, met, seqs = run_small(tmp_path / "run.json", depth=depth)
    run = read_recording(tmp_path / "run.json")
    assert run.complete and not run.stopped and run.num_steps == engine.num_steps == len(met)
    tokens = {}
    endings = {}
    for _, _, what in run.records:
        for number, *token_ids in what.get("tokens", ()):
            tokens.setdefault(number, []).extend(token_ids)
        endings |= dict(what.get("ended", ()))
    assert tokens == {number: seq.token_ids.tolist() for number, seq in seqs.items()}
    assert endings == {number: seq.finish_reason for number, seq in seqs.items()}
    told = [len(what.get("preempted", ())) for _, _, what in run.records]
    assert sum(told) == engine.stats()["num_preemptions"] > 0
    assert run.charts["used"] == [used for _, _, used, *_ in met]


def test_an_aborted_request_ends_in_the_trace(tmp_path):
    engine = make_engine(trace=str(tmp_path / "run.json"))
    params = SamplingParams(max_tokens=20)
    leaving = engine.run(engine.prepare([1, 2], SamplingParams(max_tokens=n)) for n in (2, 20))
    while not next(leaving):
        pass
    leaving.close()
    run_all(engine, [engine.prepare([1, 2, 3], params)])
    engine.close()
    run = read_recording(tmp_path / "run.json")
    ended = [tuple(entry) for _, _, what in run.records for entry in what.get("ended", ())]
    assert ended == [(0, "length"), (1, "abort"), (2, "length")]


class Failing(FakeRunner):
    """Its third token of request 1 is no token, and its tenth launch fails."""

    num_launches = num_seen = 0

    def launch(self, plan, *edits):
        self.num_launches += 1
        if self.num_launches == 10:
            raise RuntimeError("the device is gone")
        handle = super().launch(plan, *edits)
        drawn = [self.seeds[row] for row in plan.rows[plan.num_sampled > 0].tolist()]
        if 1 in drawn:
            self.num_seen += 1
            if self.num_seen == 3:
                handle._token_ids[drawn.index(1)] = -1
        return handle


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("goes_on", [True, False])
def test_the_blocks_that_a_trace_calls_findable_are_found_also_after_errors(tmp_path, depth, goes_on):
    engine = make_engine(num_blocks=24, depth=depth, trace=str(tmp_path / "run.json"))
    engine.runner.__class__ = Failing
    manager = engine.scheduler.block_manager
    met = []

    def met_now():
        return set(manager._findable.values()), set(manager._evictable) | set(manager._blank)

    planned = engine.observers[0].planned
    engine.observers[0].planned = lambda *told: (met.append(met_now()), planned(*told))
    requests = [engine.prepare([i] * 8, SamplingParams(seed=i, max_tokens=12)) for i in range(4)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_all(engine, requests)
    assert any(before - after for (before, _), (after, _) in itertools.pairwise(met)), "one request ended with an error"
    if goes_on:
        run_all(engine, requests[:1])
    engine.close()
    met.append(met_now())

    findable = set()
    references = [0] * manager.num_blocks
    shown = []
    for kind, _, what in read_recording(tmp_path / "run.json").records:
        for verb, blocks in what.get("blocks", ()):
            for block in blocks:
                references[block] += {"take": 1, "reference": 1, "release": -1}.get(verb, 0)
            if verb == "register":
                findable.update(blocks)
            elif verb in ("take", "forget"):
                findable.difference_update(blocks)
        if kind != "update":
            shown.append((findable.copy(), {block for block, count in enumerate(references) if not count}))
    assert shown == met


def test_a_trace_on_a_full_disk_keeps_nothing_of_the_run_that_goes_on(caplog):
    engine, _, _ = run_small("/dev/full", num_requests=6)
    assert "cannot be written" in caplog.text
    assert engine.num_steps > 10 and not engine.observers[0]._lines


def test_a_killed_run_loses_no_step_that_was_read(tmp_path):
    path = tmp_path / "run.json"
    engine, _, _ = run_small(path, close=False)
    assert read_recording(path).num_steps == engine.num_steps
    torn = tmp_path / "torn.json"
    torn.write_text(path.read_text()[:-20])
    run = write_page(torn, tmp_path / "torn.html")
    assert run.num_steps == engine.num_steps and not run.complete


def test_recording_stops_at_its_limit_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 200)
    engine, _, _ = run_small(tmp_path / "run.json", depth=2)
    run = read_recording(tmp_path / "run.json")
    assert run.stopped and run.complete and run.num_steps < engine.num_steps
    assert 200 <= len(json.loads((tmp_path / "run.json").read_text())) < 230
    assert run.device_time[-1] is not None, "the last step that was begun is told to its end"
    assert "the rest of the run is not recorded" in caplog.text
    assert len(engine.observers[0]._block_log) < 10, "what is not recorded is not kept either"


# ---- the page as a file


def test_a_page_is_small_and_fetches_nothing(tmp_path):
    run_small(tmp_path / "run.json", num_requests=1)
    page = render_page(read_recording(tmp_path / "run.json"), "run.json")
    assert len(page) < 300_000
    assert "http" not in page.replace('http-equiv="', "") and "default-src 'none'" in page


def test_view_writes_a_page_beside_the_trace(tmp_path, capsys):
    run_small(tmp_path / "run.json")
    assert main(["view", str(tmp_path / "run.json")]) == 0
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert "steps; open it in a browser" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "cannot be read"),
        ("", "no steps|not a trace"),
        ("[\n]", "not a trace"),
        ('{"ph": 1}', "not a trace"),
        ("[[1]]", "not a trace"),
        ("hello\nworld\nagain", "not a trace"),
        ('[\n{"name": "engine", "ph": "M", "args": {"device": "cpu"}},\n', "no steps"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, text, match):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=match) as error:
        read_recording(path)
    assert "x.json" in str(error.value)


def test_a_page_is_never_written_over_its_trace(tmp_path):
    run_small(tmp_path / "run.json", num_requests=1)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match="is the trace itself"):
        write_page(tmp_path / "run.json", tmp_path / "run.json")
    assert (tmp_path / "run.json").read_bytes() == before
    with pytest.raises(ValueError, match="cannot be written"):
        write_page(tmp_path / "run.json", tmp_path / "missing" / "run.html")


# ---- the page in a browser


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium. Where there is none the tests skip, unless NANOVLLM_TEST_BROWSER asks for it."""
    required = bool(os.environ.get("NANOVLLM_TEST_BROWSER"))
    if not required:
        pytest.importorskip("selenium")
    try:
        driver = start_browser()
    except FileNotFoundError as missing:
        pytest.fail(str(missing)) if required else pytest.skip(str(missing))
    yield driver
    driver.quit()


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_of_the_page_shows_what_the_engine_met(browser, tmp_path, depth):
    engine, met, _ = run_small(tmp_path / "run.json", depth=depth)
    page = Page(browser, tmp_path / "run.json")
    names = ("running", "waiting", "owned", "shared", "cached", "blank", "decode")
    script = "return arguments[0].map((name) => document.getElementById('step-' + name).textContent)"
    for k, (running, waiting, used, cached, blank, decode) in enumerate(met):
        shown = dict(zip(names, map(int, browser.execute_script(script, names)), strict=True))
        assert page.text("step-title").startswith(f"Step {k + 1} of {len(met)},")
        assert (shown["running"], shown["waiting"], shown["decode"]) == (running, waiting, decode), k
        assert (shown["owned"] + shown["shared"], shown["cached"], shown["blank"]) == (used, cached, blank), k
        page.press("\ue014")  # right
    assert page.text("step-title").startswith("The end")
    stats = engine.stats()
    totals = {
        "steps": stats["num_steps"],
        "prompt": stats["num_prompt_tokens"],
        "cached": stats["num_cached_tokens"],
        "generated": stats["num_generated_tokens"],
        "preemptions": stats["num_preemptions"],
        "free": stats["num_free_blocks"],
    }
    assert {name: page.number(f"total-{name}") for name in totals} == totals
    assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] > 0 and page.number("total-evictions") > 0
    # Going back replays from a saved pool: the same numbers.
    for k in (len(met) - 3, 5, len(met) // 2):
        browser.execute_script("go(arguments[0])", k)
        page.settle()
        shown = dict(zip(names, map(int, browser.execute_script(script, names)), strict=True))
        assert (shown["owned"] + shown["shared"], shown["cached"], shown["blank"]) == met[k][2:5], k
    assert page.errors() == []


def test_a_request_shows_its_text_and_a_hostile_prompt_stays_text(browser, tmp_path):
    path = tmp_path / "run.json"
    with LLM("tiny-qwen3", trace=str(path), **ROOM) as llm:
        prompts = [HOSTILE, *["what is the capital of Japan?"] * 3]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    page = Page(browser, path)
    page.press("]")
    assert page.text("request-title") == "Request 0"
    page.press("\ue010")  # End
    whole = llm.engine.tokenizer.decode(outputs[0]["token_ids"], False)
    assert page.text("tokens") == HOSTILE + whole
    page.press("\ue011")  # Home: nothing was sampled yet
    hidden = browser.execute_script("return document.querySelectorAll('#tokens .future').length")
    assert hidden == len(outputs[0]["token_ids"])
    assert browser.execute_script("return document.images.length") == 0
    assert browser.title.startswith("run.json") and page.errors() == []


def test_the_keyboard_plays_jumps_and_chooses(browser, tmp_path):
    run_small(tmp_path / "run.json")
    page = Page(browser, tmp_path / "run.json")
    step = "return cursor"
    browser.execute_script("document.getElementById('kind').value = 'preemption'")
    page.press("n")
    at = browser.execute_script(step)
    assert at > 0 and "is preempted" in page.text("events")
    victim = int(page.text("events").split("request ")[1].split(" ")[0])
    browser.execute_script("choose(arguments[0])", victim)
    page.settle()
    assert "is preempted" in page.text("life") and page.text("request-blocks") == "none"
    page.press("p")
    assert browser.execute_script(step) == at, "there is none before the first"
    page.press("\ue011", " ")
    assert "pause" in page.text("play")
    deadline = time.monotonic() + 60
    while browser.execute_script(step) <= 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    page.press(" ")
    assert browser.execute_script(step) > 1 and "play" in page.text("play")
    page.press("+", "+", "0", "]", "[", "\ue00c")  # Escape
    assert page.text("request-title") == "One request" and page.errors() == []


def test_a_click_on_a_block_chooses_its_owner_in_light_and_dark(browser, tmp_path):
    run_small(tmp_path / "run.json")
    page = Page(browser, tmp_path / "run.json")
    browser.execute_script("go(12)")
    page.settle()
    for _ in range(2):
        place = browser.execute_script(
            "choose(null); const [id, blocks] = [...poolAt(cursor).tables].pop(), b = blocks[blocks.length - 1];"
            "const box = document.getElementById('blocks').getBoundingClientRect();"
            "return [id, box.width, box.height, (b % grid.across + 0.5) * grid.size, "
            "(Math.floor(b / grid.across) + 0.5) * grid.size]"
        )
        number, width, height, x, y = place
        from selenium.webdriver import ActionChains

        blocks = browser.find_element("id", "blocks")
        ActionChains(browser).move_to_element_with_offset(blocks, x - width / 2, y - height / 2).click().perform()
        page.settle()
        assert page.text("request-title") == f"Request {number}"
        page.click("theme")
    assert page.errors() == []


@pytest.mark.slow
def test_a_hundred_thousand_events_play_and_scrub(browser, tmp_path):
    """How many frames a second that makes is printed by benchmarks/bench_small_costs.py."""
    record_a_hundred_thousand_events(tmp_path / "run.json")
    run = read_recording(tmp_path / "run.json")
    assert run.stopped and sum(1 for _ in (tmp_path / "run.json").open()) >= trace_module.MAX_EVENTS
    page = Page(browser, tmp_path / "run.json")
    for scrubs in (False, True):
        assert len(page.time_frames(scrubs)) == 75
    assert "100,000 events" in page.text("notice") and page.errors() == []


# ---- damaged traces

STRANGE = [None, -1, 10**30, 1e308, "x", [], {}, True, "__proto__", HOSTILE, [[[]]], {"step": "__proto__"}, 2**53]


def damage_events(events, draw):
    """Remove, double or change some events, or fields of events, or fields of their arguments."""
    events = json.loads(json.dumps(events))
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(events))
        kind = draw.choice(("remove", "insert", "remove a field", "change", "change"))
        fields = events[at] if isinstance(events[at], dict) and events[at] else {"": None}
        key = draw.choice(list(fields))
        if kind == "remove":
            del events[at]
        elif kind == "insert":
            events.insert(at, draw.choice((events[at], draw.choice(STRANGE))))
        elif kind == "remove a field":
            fields.pop(key)
        elif isinstance(fields[key], dict) and fields[key]:
            inner = draw.choice(list(fields[key]))
            if draw.random() < 0.5:
                fields[key][inner] = draw.choice(STRANGE)
            else:
                del fields[key][inner]
        else:
            fields[key] = draw.choice(STRANGE)
    return json.dumps(events).encode()


def damage_bytes(content, draw):
    damaged = bytearray(content)
    for _ in range(draw.choice((1, 3, 20))):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    return bytes(damaged[: draw.randrange(1, len(damaged))] if draw.random() < 0.5 else damaged)


WHOLE_FILES = ["", "null", "5", '"a"', "[]", "[" * 100_000, "{}", "NaN", "\ufeff[]", "[\n" + "x,\n" * 10]
WHOLE_FILES += [
    f'[{{"ph":"M","name":"x","args":{args}}}]' for args in ("5", "[1]", '{"a":' + "[" * 900 + "]" * 900 + "}")
]


def test_a_damaged_trace_is_shown_or_refused_by_a_value_error(tmp_path):
    run_small(tmp_path / "run.json", num_requests=6)
    content = (tmp_path / "run.json").read_bytes()
    events = json.loads(content)
    draw = random.Random(1)
    files = [damage_events(events, draw) for _ in range(600)] + [damage_bytes(content, draw) for _ in range(200)]
    results = {"shown": 0, "refused": 0}
    for number, damaged in enumerate([*files, *(text.encode() for text in WHOLE_FILES)]):
        (tmp_path / "damaged.json").write_bytes(damaged)
        try:
            page = write_page(tmp_path / "damaged.json", tmp_path / "damaged.html")
            results["shown"] += page.num_steps > 0
        except ValueError as error:
            assert "damaged.json" in str(error) and len(str(error)) < 1000, number
            results["refused"] += 1
    assert sum(results.values()) == len(files) + len(WHOLE_FILES) and min(results.values()) > 100, results
