"""The estimator's page shows what `nanovllm estimate` prints."""

import json
import random
import shlex
from typing import Any

import pytest
import torch

from docs.estimator import AWQ, DTYPES, NUMBERS, describe_preset, render_estimator
from nanovllm.apps.cli import main
from nanovllm.apps.floor import Machine, Model, step_cost
from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.models.model_config import load_model_config

SET = """
const [settings] = arguments;
for (const [name, value] of Object.entries(settings)) {
  const input = document.getElementById("est-" + name);
  if (input.tagName === "SELECT") input.selectedIndex = Math.floor(value * input.options.length);
  else input.value = Number(input.min) + Math.round(value * (Number(input.max) - Number(input.min)));
  input.dispatchEvent(new Event("input", { bubbles: true }));
}
const read = (name) => document.getElementById("est-" + name).textContent;
const rows = [...document.getElementById("est-table").rows];
return {
  table: rows.map((row) => [...row.cells].map((cell) => cell.textContent)),
  place: read("place"), verdict: read("verdict"), speed: read("speed"), command: read("command"),
  bandwidth: read("bandwidth-is"), arithmetic: read("arithmetic-is"),
};
"""
"""Sets each control to a place between its ends, from 0 to 1, and returns what the page shows."""

CONTROLS = ("device", "gpus", "model", "weights", "dtype", "memory", "bandwidth", "arithmetic", "context", "sequences")


@pytest.fixture
def page(browser: Any, tmp_path: Any) -> Any:
    path = tmp_path / "estimator.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{render_estimator()}', encoding="utf-8")
    browser.get(f"file://{path}")
    return browser


def read_numbers(line: str, start: str, end: str) -> float:
    return float(line.partition(start)[2].partition(end)[0].replace(",", ""))


@pytest.mark.slow
def test_drawn_settings_show_the_numbers_of_the_command_that_the_page_names(
    page: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(55)
    drawn = [{name: draw.random() for name in CONTROLS} for _ in range(28)]
    drawn[0] |= {"device": 0, "gpus": 0.9, "model": (list(PRESETS).index("qwen2.5-0.5b") + 0.5) / len(PRESETS)}
    num_fit = 0
    num_refused = 0
    places = []
    for setting in drawn:
        shown = page.execute_script(SET, setting)
        program, *arguments = shlex.split(shown["command"])
        assert program == "nanovllm"
        if arguments[1] == "FOLDER-OF-A-CHECKPOINT":
            preset = page.find_element("id", "est-model").get_property("value")
            (tmp_path / "config.json").write_text(json.dumps(preset_config(preset) | {"quantization_config": AWQ}))
            arguments[1] = str(tmp_path)
        status = main(arguments)
        out, said = capsys.readouterr()
        if status == 2:
            assert shown["verdict"].removeprefix("It does not run: ").rstrip(".") in said and not shown["speed"]
            num_refused += 1
            continue
        place, code, *rows, verdict = out.splitlines()
        assert place.endswith(shown["place"] or ", on one GPU")
        places.append(place)
        fits = status == 0
        assert code.split() == ["runs", "natively"], "the page knows these models alone"
        assert shown["table"] == [[row[2:34].rstrip(), row[34:]] for row in rows], shown["command"]
        assert verdict.startswith(shown["verdict"]) and fits == bool(shown["speed"])
        num_fit += fits
    assert 5 < num_fit < 28 - num_refused < 28, "14 heads have no eight equal parts"
    assert all(sum(place.endswith(f" {n} GPUs") for place in places) > 1 for n in (2, 4, 8))
    assert not [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def count_activations(model: Model, running: int) -> float:
    """Return the bytes that the benchmark counts beside weights, states and the keys and values that are read."""
    numbers = sum(count * sum(shape) for shape, count in model.matrices.items()) + 2 * model.config.vocab_size
    for gate_up, down in model.experts:
        numbers += model.experts_per_token * (sum(gate_up.shape) + sum(down.shape))
    return running * (numbers * model.dtype.itemsize + model.kv_bytes_per_token)


@pytest.mark.slow
def test_bytes_and_operations_of_a_step_are_those_of_the_benchmark(page: Any) -> None:
    draw = random.Random(4)
    nothing = Machine(1, 1, 1)
    bound = set()
    for i in range(40):
        places = {name: draw.random() for name in CONTROLS} | {"weights": 0, "dtype": i % 2 / 2, "memory": 1}
        shown = page.execute_script(SET, places)
        if not shown["speed"]:
            continue
        name = page.find_element("id", "est-model").get_property("value")
        dtype = getattr(torch, page.find_element("id", "est-dtype").get_property("value"))
        context = int(shown["command"].partition("--max-model-len ")[2].split()[0])
        running = int(read_numbers(shown["speed"], "With ", " sequence"))
        model = Model(load_model_config(preset_config(name), name), dtype)
        cost = step_cost(model, nothing, [(context - 1, 1)] * running, running)
        assert read_numbers(shown["speed"], " and does ", " billion") == pytest.approx(cost.flops / 1e9, abs=0.051)
        read = read_numbers(shown["speed"], " reads ", " GB")
        assert read == pytest.approx((cost.bytes - count_activations(model, running)) / 1e9, rel=0.005, abs=0.01)
        bandwidth = read_numbers("=" + shown["bandwidth"], "=", " GB/s")
        arithmetic = read_numbers("=" + shown["arithmetic"], "=", " TFLOP/s")
        gpus = int([*shown["command"].partition("--tensor-parallel-size ")[2].split(), "1"][0])
        seconds = max(read / bandwidth, cost.flops / arithmetic / 1e12) / gpus
        assert read_numbers(shown["speed"], "more than ", " tokens") == pytest.approx(
            running / seconds, rel=0.01, abs=1
        )
        bound.add(("memory binds" in shown["speed"], gpus > 1))
    assert len(bound) == 4


def test_the_numbers_of_the_page_are_those_of_today() -> None:
    written = json.loads(NUMBERS.read_text(encoding="utf-8"))
    assert list(written) == list(PRESETS)
    found = describe_preset("qwen2.5-0.5b", DTYPES[:1])
    assert written["qwen2.5-0.5b"] == written["qwen2.5-0.5b"] | found, "run python -m docs.estimator"
    assert "2" in found["bfloat16"]["gpus"] and "cannot share" in found["bfloat16"]["gpus"]["4"]


@pytest.mark.slow
def test_the_numbers_of_every_model_are_those_of_today() -> None:
    """In bfloat16, on one GPU: drawn settings, above, have the other type and several."""
    written = json.loads(NUMBERS.read_text(encoding="utf-8"))
    found = {name: describe_preset(name, DTYPES[:1], [1]) for name in PRESETS}
    for name, numbers in found.items():
        share = numbers.pop("bfloat16")["gpus"]["1"]
        assert written[name] == written[name] | numbers, "run python -m docs.estimator"
        assert written[name]["bfloat16"]["gpus"]["1"] == share, "run python -m docs.estimator"
    assert [*written] == [*found]
