"""The trace and the window: what a page shows is what the engine did, in a real browser."""

import itertools
import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers.fakes import FakeRunner, make_engine, run_all
from helpers.paths import ROOT
from helpers.window import Page, record_a_hundred_thousand_events, run_small

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli import main
from nanovllm.apps.view.page import find_first_difference, read_recording, render_page, write_page

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
    from nanovllm.features import trace as trace_module

    monkeypatch.setattr(trace_module, "MAX_EVENTS", 200)
    engine, _, _ = run_small(tmp_path / "run.json", depth=2)
    run = read_recording(tmp_path / "run.json")
    assert run.stopped and run.complete and run.num_steps < engine.num_steps
    assert 200 <= len(json.loads((tmp_path / "run.json").read_text())) < 230
    assert run.device_time[-1] is not None, "the last step that was begun is told to its end"
    assert "the rest of the run is not recorded" in caplog.text
    assert len(engine.observers[0]._block_log) < 10, "what is not recorded is not kept either"


def test_a_trace_says_how_many_blocks_were_lacking(tmp_path):
    """Two requests of 8 tokens fill a pool of 8 blocks of 4 when they have 16 each; the next token needs one more."""
    engine = make_engine(num_blocks=8, max_num_batched_tokens=64, caching=False, trace=str(tmp_path / "run.json"))
    params = SamplingParams(max_tokens=12)
    run_all(engine, [engine.prepare([i] * 8, params) for i in range(2)] + [engine.prepare([7] * 20, params)])
    engine.close()
    plans = [what for kind, _, what in read_recording(tmp_path / "run.json").records if kind == "plan"]
    (preempting,) = [what for what in plans if "preempted" in what]
    assert (preempting["preempted"], preempting["lacking"]) == ([1], [2]), "each of the two needs its fifth block"
    assert plans[0]["held"] == [2, 1], "two requests of two blocks leave four, and the third needs five"


def test_reasons_are_recorded_for_every_preemption(tmp_path):
    engine, _, _ = run_small(tmp_path / "run.json", depth=2)
    plans = [what for kind, _, what in read_recording(tmp_path / "run.json").records if kind == "plan"]
    lacking = [what["lacking"] for what in plans if "preempted" in what]
    assert sum(map(len, lacking)) == engine.stats()["num_preemptions"] > 0
    assert all(number > 0 for numbers in lacking for number in numbers)
    assert all("held" not in what or what["held"][1] > 0 for what in plans)


# ---- the page as a file


def test_a_page_of_two_runs_knows_where_they_first_differ(tmp_path):
    for name, num_blocks in (("a", 14), ("same", 14), ("roomy", 30)):
        run_small(tmp_path / f"{name}.json", num_requests=8, num_blocks=num_blocks)
    run, same, roomy = (read_recording(tmp_path / f"{name}.json") for name in ("a", "same", "roomy"))
    assert find_first_difference(run, same) is None
    at = find_first_difference(run, roomy)
    assert at is not None and 0 < at < run.num_steps
    assert [r for r in run.records if r[1] < at] == [r for r in roomy.records if r[1] < at]


def test_view_compares_two_traces(tmp_path, capsys):
    for name, num_blocks in (("a", 14), ("b", 20)):
        run_small(tmp_path / f"{name}.json", num_requests=4, num_blocks=num_blocks)
    paths = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    assert main(["view", *paths, "-o", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert page.startswith("<!doctype html>") and "a.json" in page and "b.json" in page
    assert "http" not in page.replace("http-equiv=", "")
    with pytest.raises(ValueError, match="is the trace itself"):
        write_page(Path(paths[0]), Path(paths[1]), Path(paths[1]))


def test_a_page_has_the_links_that_explain_its_events(tmp_path):
    run_small(tmp_path / "run.json", num_requests=1)
    page = render_page(read_recording(tmp_path / "run.json"), "run.json", {"hit": "5-prefixes/"})
    assert '"guide":{"hit":"5-prefixes/"}' in page


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


@pytest.mark.slow
def test_every_step_of_the_page_shows_what_the_engine_met(browser, tmp_path):
    engine, met, _ = run_small(tmp_path / "run.json", depth=2)
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


@pytest.fixture
def page(browser, tmp_path):
    """The page of a small run, in a window of 1400 x 1000."""
    browser.set_window_size(1400, 1000)
    run_small(tmp_path / "run.json")
    page = Page(browser, tmp_path / "run.json")
    yield page
    assert page.errors() == []


def test_the_story_of_a_request_stands_beside_the_timeline(page):
    page.press("]")
    story, lanes, life = page.browser.execute_script(
        "return ['story', 'lanes', 'life'].map((id) => document.getElementById(id).getBoundingClientRect().toJSON())"
    )
    assert story["left"] >= lanes["right"] and story["top"] < lanes["bottom"]
    assert life["bottom"] < page.browser.execute_script("return innerHeight") <= 1000
    assert page.browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


# The contrast of each block's number: its ink on its fill, and the fills that are drawn.
CONTRASTS = """
const light = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
  .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => {
  const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y);
  return (bright + 0.05) / (dark + 0.05);
};
const ratio = window.devicePixelRatio || 1, pool = poolAt(cursor), own = pool.tables.get(chosen);
const fill = (b) => { const p = grid.g.getImageData(((b % grid.across) * grid.size + 6) * ratio,
  (Math.floor(b / grid.across) * grid.size + grid.size - 9) * ratio, 1, 1).data;
  return "#" + [...p.slice(0, 3)].map((v) => v.toString(16).padStart(2, "0")).join(""); };
const others = Array.from({ length: grid.shown }, (_, b) => b)
  .filter((b) => !own.includes(b) && pool.references[b] > 0);
return { own: own.map(fill), others: others.map(fill), color: ownerColor(chosen), faded: color.grid,
  inks: contrast(inkOn(ownerColor(chosen)), ownerColor(chosen)), frame: contrast(color.text, color.grid),
  others_inks: contrast(color.faint, color.grid) };
"""


def test_a_chosen_request_is_legible_among_faded_blocks_in_both_themes(page):
    page.browser.execute_script("go(12); choose([...poolAt(12).tables.keys()].pop())")
    for _ in range(2):
        page.settle()
        shown = page.browser.execute_script(CONTRASTS)
        assert set(shown["own"]) == {shown["color"]} and set(shown["others"]) == {shown["faded"]}, shown
        assert shown["inks"] >= 4.5 and shown["frame"] >= 4.5 and shown["others_inks"] >= 3
        page.click("theme")


@pytest.mark.slow
def test_a_request_says_what_it_does_and_that_it_has_ended(page):
    script = "return [...requests.values()].map(({ id, end, reason, notes }) => [id, notes[0][0], end, reason])"
    for number, arrives, end, reason in page.browser.execute_script(script):
        page.browser.execute_script("choose(arguments[0]); go(arguments[1])", number, end)
        page.settle()
        assert page.text("request-state").startswith(f"It ended after step {end} ({reason})")
        page.browser.execute_script("go(arguments[0])", end - 1)
        page.settle()
        assert "ended" not in page.text("request-state")
        if arrives:
            page.browser.execute_script("go(arguments[0])", arrives - 1)
            page.settle()
            assert page.text("request-state") == "It has not arrived yet."


def test_a_prefix_hit_names_who_computed_the_blocks_and_who_found_them(page):
    hits = page.browser.execute_script("return steps.flatMap((s, k) => s.hits.map((hit) => [k, hit]))")
    assert len(hits) > 5
    with_donor = [(step, hit) for step, hit in hits if hit["donors"]]
    assert len(with_donor) > len(hits) // 2
    for step, hit in with_donor[:5]:
        taker = hit["id"]
        donor = hit["donors"][0]
        assert 4 * len(hit["blocks"]) == hit["cached"]
        page.browser.execute_script("choose(arguments[0]); go(arguments[1])", donor, step)
        page.settle()
        assert f"request {taker} takes over blocks that this one computed" in page.text("life")
        shown = page.text("events").split(f"request {taker}: {hit['cached']} tokens found in the prefix cache, ")[1]
        assert re.match(rf"computed by requests? {donor}\b", shown)


@pytest.mark.slow
def test_a_tour_of_six_stops_begins_at_the_first_visit_alone(page):
    page.browser.execute_script("localStorage.clear()")
    page.browser.refresh()
    page.settle()
    marked = []
    while page.browser.find_element("id", "tour").is_displayed():
        marked += page.browser.execute_script("return [...document.querySelectorAll('.marked')].map((e) => e.id)")
        assert page.text("tour-words").startswith(f"{len(marked)} of 6. ")
        page.click("tour-next")
    assert marked == ["timeline", "timeline", "pool", "events", "story", "controls"]
    assert page.browser.execute_script("return document.querySelectorAll('.marked').length") == 0
    page.browser.refresh()
    page.settle()
    assert not page.browser.find_element("id", "tour").is_displayed()
    page.click("tour-again")
    page.click("tour-end")
    assert not page.browser.find_element("id", "tour").is_displayed()


def test_pictures_have_labels_and_a_steps_events_are_announced_in_whole_lines(page):
    page.press("n")
    labels = page.browser.execute_script(
        "return [...document.querySelectorAll('canvas')].filter((c) => c.ariaHidden !== 'true').map((c) => c.ariaLabel)"
    )
    assert len(labels) == 8 and all(labels) and "with one owner" in " ".join(labels) and "Step" in labels[0]
    live = "return document.getElementById('events').getAttribute('aria-live')"
    assert page.browser.execute_script(live) == "polite"
    page.click("play")
    assert page.browser.execute_script(live) == "off", "nobody can listen to ten steps a second"
    page.click("play")
    heights = page.browser.execute_script(
        "go(steps.findIndex((s) => s.preempted.length && s.hits.length)); draw();"
        "const list = document.getElementById('events');"
        "return [list.clientHeight, ...[...list.children].map((item) => item.getBoundingClientRect().height)]"
    )
    assert len(heights) > 1 and all(height % 20 == 0 for height in heights), heights


def test_events_say_why_and_lead_to_the_request(page):
    page.browser.execute_script("document.getElementById('kind').value = 'preemption'")
    page.press("n")
    assert re.search(r"is preempted: it was admitted last, and \d+ blocks? w(as|ere) lacking", page.text("events"))
    page.browser.execute_script("document.querySelector('#events button').click()")
    page.settle()
    assert page.text("request-title") == f"Request {page.browser.execute_script('return chosen')}"
    assert page.browser.execute_script("return steps[cursor].preempted[0][0] === chosen")


@pytest.mark.slow
def test_two_runs_go_step_by_step_together(browser, tmp_path):
    run_small(tmp_path / "a.json")
    run_small(tmp_path / "b.json", num_blocks=20)
    write_page(tmp_path / "a.json", tmp_path / "both.html", tmp_path / "b.json")
    browser.get(f"file://{tmp_path / 'both.html'}")

    def steps_shown():
        titles = []
        for frame in browser.find_elements("tag name", "iframe"):
            browser.switch_to.frame(frame)
            titles.append(browser.find_element("id", "step-title").get_property("textContent").split(" of ")[0])
            browser.switch_to.default_content()
        return titles

    def wait_for(*titles):
        deadline = time.monotonic() + 30
        while steps_shown() != list(titles) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert steps_shown() == list(titles)

    wait_for("Step 1", "Step 1")
    browser.find_element("id", "forward").click()
    wait_for("Step 2", "Step 2")
    browser.switch_to.frame(browser.find_elements("tag name", "iframe")[1])
    assert not browser.find_element("id", "controls").is_displayed(), "one set of controls for both"
    browser.execute_script("go(cursor + 1)")
    browser.switch_to.default_content()
    wait_for("Step 3", "Step 3")
    first, second = browser.find_elements("tag name", "iframe")
    browser.switch_to.frame(first)
    browser.execute_script("choose(2)")
    browser.switch_to.default_content()
    browser.switch_to.frame(second)
    deadline = time.monotonic() + 30
    while browser.find_element("id", "request-title").text != "Request 2" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert browser.find_element("id", "request-title").text == "Request 2"
    browser.switch_to.default_content()
    at = find_first_difference(*(read_recording(tmp_path / name) for name in ("a.json", "b.json")))
    browser.find_element("id", "first-difference").click()
    wait_for(f"Step {at + 1}", f"Step {at + 1}")
    assert browser.find_element("id", "difference").text == f"The runs first differ in step {at + 1}."
    browser.find_element("id", "first").click()
    events = []
    for frame in (first, second):
        browser.switch_to.frame(frame)
        events += browser.execute_script("return steps.flatMap((s, k) => k && isEvent.any(s) ? [k] : [])")
        browser.switch_to.default_content()
    browser.find_element("id", "next-event").click()
    wait_for(*[f"Step {min(events) + 1}"] * 2)
    for name in ("zoom-in", "theme", "play"):
        browser.find_element("id", name).click()
    assert "pause" in browser.find_element("id", "play").text
    browser.find_element("id", "last").click()
    assert "play" in browser.find_element("id", "play").text and browser.find_element("id", "step").text == "the end"
    from selenium.webdriver.common.keys import Keys

    page = browser.find_element("tag name", "body")
    ten_on = Keys.SHIFT + Keys.ARROW_RIGHT
    for keys, title in ((Keys.HOME, "step 1"), (Keys.ARROW_RIGHT, "step 2"), (ten_on, "step 12")):
        page.send_keys(keys)
        assert browser.find_element("id", "step").text == title, "the keys are those of one run's window"
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.slow
def test_the_last_lane_shows_the_requests_that_live_in_the_visible_steps(browser, tmp_path):
    run_small(tmp_path / "run.json", num_requests=600)
    page = Page(browser, tmp_path / "run.json")
    alive = """
    const inView = ({ from, to }) => from < view.to && to >= view.from;
    return [rows, order.filter((id) => requests.get(id).life.some(inView)), requests.size]
    """
    rows, lives, count = browser.execute_script(alive)
    assert rows == lives and len(rows) == count == 600
    for _ in range(6):
        page.press("+")
    rows, lives, _ = browser.execute_script(alive)
    assert rows == lives and 6 <= len(rows) < 60
    browser.execute_script("choose(599)")
    assert browser.execute_script(alive)[0] == [*rows, 599], "the chosen one is shown, too"
    assert page.errors() == []


def test_a_request_s_text_scrolls_by_keyboard(page):
    page.press("]")
    tokens = page.browser.find_element("id", "tokens")
    page.browser.find_elements("css selector", "#life ol button")[-1].send_keys("\ue004")  # Tab
    assert page.browser.switch_to.active_element == tokens
    assert tokens.aria_role == "region" and tokens.accessible_name == "its tokens so far"


def test_the_demo_of_the_site_shows_every_kind_of_event(browser, tmp_path):
    shutil.copy(ROOT / "docs" / "guide" / "demo.json", tmp_path / "demo.json")
    page = Page(browser, tmp_path / "demo.json")
    counts = page.browser.execute_script(
        "return ['hit', 'eviction', 'preemption'].map((kind) => steps.filter(isEvent[kind]).length)"
    )
    assert min(counts) > 5 and page.errors() == []


@pytest.mark.slow
def test_a_hundred_thousand_events_play_and_scrub(browser, tmp_path):
    """How many frames a second that makes is printed by benchmarks/bench_small_costs.py."""
    from nanovllm.features import trace as trace_module

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
    files = [damage_events(events, draw) for _ in range(300)] + [damage_bytes(content, draw) for _ in range(100)]
    results = {"shown": 0, "refused": 0}
    for number, damaged in enumerate([*files, *(text.encode() for text in WHOLE_FILES)]):
        (tmp_path / "damaged.json").write_bytes(damaged)
        try:
            page = write_page(tmp_path / "damaged.json", tmp_path / "damaged.html")
            results["shown"] += page.num_steps > 0
        except ValueError as error:
            assert "damaged.json" in str(error) and len(str(error)) < 1000, number
            results["refused"] += 1
    assert sum(results.values()) == len(files) + len(WHOLE_FILES) and min(results.values()) > 50, results
