"""benchmarks/bench_quality.py: its sums are those of plain torch, and an interrupted run goes on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import save_random
from transformers import Qwen3ForCausalLM

from benchmarks import bench_quality
from benchmarks.bench_quality import (
    OUTLIERS,
    Format,
    Window,
    compare_window,
    open_llm,
    print_table,
    read_logits,
    round_matrix,
)

FLOAT32 = Format({"dtype": "float32"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random(folder)
    return folder


def test_sums_are_those_of_plain_torch(model: Path) -> None:
    """Two formats of one model, scored in windows that are cut into several rows of logits."""
    window = Window([5], [7, 3, 9, 11] * 30)
    with open_llm(model, FLOAT32, 256) as reference, open_llm(model, Format({"dtype": "float32"}, 16), 256) as rounded:
        tally = compare_window(rounded, reference, window)
        theirs, mine = (read_logits(llm, window).double().log_softmax(1) for llm in (reference, rounded))
        itself = compare_window(reference, reference, window)
    targets = torch.tensor(window.continuation)
    assert (tally.num_tokens, len(theirs)) == (120, 120)
    losses = [-values.gather(1, targets[:, None]).sum().item() for values in (mine, theirs)]
    assert (tally.loss, tally.reference_loss) == pytest.approx(losses, rel=1e-5)
    divergence = torch.nn.functional.kl_div(mine, theirs, reduction="sum", log_target=True).item()
    assert tally.divergence == pytest.approx(divergence, rel=1e-3)
    assert tally.num_same == (mine.argmax(1) == theirs.argmax(1)).sum()
    assert (itself.divergence, itself.num_same) == (0.0, 120)


@pytest.mark.parametrize(("rounding", "steps"), [("int8", 127), (32, 7.5), (5, 7.5)])
def test_rounding_is_to_the_nearest_step_of_its_group(rounding: str | int, steps: float) -> None:
    weight = torch.randn(6, 70, generator=torch.Generator().manual_seed(0))
    rounded = round_matrix(weight, rounding)
    for values, found in zip(weight, rounded, strict=True):
        for group, its in zip(
            *(row.split(rounding if isinstance(rounding, int) else 70) for row in (values, found)), strict=True
        ):
            step = group.abs().max() / steps
            # A value near the largest may be half a step beyond the last code of int4.
            assert (group - its).abs().max() <= 0.5001 * step


@pytest.mark.parametrize("in_first_token", [False, True])
def test_few_inputs_become_as_many_times_as_large(tmp_path: Path, in_first_token: bool) -> None:
    """transformers says what the first layer's attention and MLP read before and after."""

    def read() -> dict[str, torch.Tensor]:
        model = Qwen3ForCausalLM.from_pretrained(tmp_path)
        layer = model.model.layers[0]
        found: dict[str, torch.Tensor] = {}
        for name in ("input_layernorm", "self_attn.q_proj", "mlp.down_proj"):
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, name=name: found.update({name: inputs[0][0]})
            )
        with torch.no_grad():
            model(torch.tensor([[0, 5, 9]]))
        return found

    save_random(tmp_path)
    before = read()
    bench_quality.enlarge_inputs(tmp_path / "model.safetensors", 50, in_first_token)
    after = read()
    if in_first_token:
        changed = before["input_layernorm"] != after["input_layernorm"]
        assert changed.sum(1).tolist() == [OUTLIERS, 0, 0]
        assert (after["input_layernorm"][changed].abs() / before["input_layernorm"].std() > 25).all()
        return
    assert torch.equal(before["input_layernorm"], after["input_layernorm"])
    ratios = after["self_attn.q_proj"] / before["self_attn.q_proj"]
    is_large = (ratios - 50).abs() < 1e-3
    assert is_large.sum(1).tolist() == [OUTLIERS] * 3
    assert torch.equal(after["self_attn.q_proj"][~is_large], before["self_attn.q_proj"][~is_large])
    usual = after["mlp.down_proj"].abs().median()
    assert (after["mlp.down_proj"].abs().max(1).values > 50 * usual).all()


def test_an_interrupted_run_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [Window([1], [2, 3, 4]), Window([4], [5, 6])]
    monkeypatch.setattr(bench_quality, "make_windows", lambda *_: windows)
    results = tmp_path / "results.jsonl"
    arguments = [str(model), "--results", str(results), "--formats", "bfloat16", "--checkpoint", str(model)]
    bench_quality.main(arguments)
    table = capsys.readouterr().out
    assert "| the reference, float32 |" in table and "5 tokens were scored" in table
    lines = results.read_text().splitlines()
    assert len(lines) == 4
    results.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    compared: list[Any] = []
    compare = bench_quality.compare_window
    monkeypatch.setattr(bench_quality, "compare_window", lambda *args: compared.append(args[2]) or compare(*args))
    bench_quality.main(arguments)
    assert compared == [windows[1]]
    assert capsys.readouterr().out == table


def test_perplexity_is_of_the_mean_over_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    tallies = [
        bench_quality.Tally(3, 3 * math.log(5), 3 * math.log(4), 0.3, 2),
        bench_quality.Tally(1, math.log(5), math.log(4), 0.1, 1),
    ]
    print_table({"some": tallies}, {"some": (1500, 2000)})
    assert "| the reference, float32 | 4.0000 |" in (out := capsys.readouterr().out)
    assert "| some | 5.0000 | +25.00 % | 0.10000000 | 75.00 % | 1,500 | 6.00 |" in out


def test_text_ships_with_python_and_the_repository() -> None:
    text = bench_quality.default_text()
    assert len(text) > 300_000 and "Benchmarks" in text
