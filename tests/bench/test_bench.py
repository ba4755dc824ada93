"""bench.py: its workload is nano-vLLM's, its arithmetic is right, and a tiny run ends in one JSON line."""

import io
import itertools
import json
import random
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.warm import WarmPython

import bench
from benchmarks import bench_compare
from benchmarks.bench_workload import write_checkpoint
from nanovllm.apps.bench import make_workload
from nanovllm.apps.floor import Cost, Machine, Model, count_keys, ideal_steps, step_cost
from nanovllm.models.model_config import load_model_config

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
TINY = QWEN3_06B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
}


def test_the_default_workload_is_nano_vllms() -> None:
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    output_lens = [random.randint(100, 1024) for _ in range(256)]
    args = bench.parse_arguments([])
    workload = make_workload(args.num_seqs, tuple(args.input_len), tuple(args.output_len), 151936)
    assert workload.prompts == prompts
    assert workload.output_lens == output_lens
    assert sum(output_lens) == 133966  # what nano-vLLM's README reports
    assert args.temperature == 0.6


def test_a_workload_fits_a_small_vocabulary_and_shares_its_prefix() -> None:
    workload = make_workload(5, (3, 9), (2, 4), vocab_size=50, shared_prefix=20)
    assert all(0 <= token < 50 for prompt in workload.prompts for token in prompt)
    assert len({tuple(prompt[:20]) for prompt in workload.prompts}) == 1
    assert all(23 <= len(prompt) <= 29 for prompt in workload.prompts)
    other = workload.warm_up(50)
    assert [len(prompt) for prompt in other.prompts] == [len(prompt) for prompt in workload.prompts]
    assert all(a[0] != b[0] for a, b in zip(workload.prompts, other.prompts, strict=True))


def test_the_cpu_preset_gives_way_to_options() -> None:
    args = bench.parse_arguments(["--preset", "cpu", "--num-seqs", "3"])
    assert (args.num_seqs, args.input_len, args.output_len, args.dtype) == (3, [16, 128], [16, 128], "bfloat16")


def make_model(config: dict[str, Any]) -> Model:
    return Model(load_model_config(config, "test"), torch.bfloat16)


def test_the_cost_card_of_qwen3_06b() -> None:
    model = make_model(QWEN3_06B)
    # A layer: 1024 x 4096 qkv, 2048 x 1024 o, 1024 x 6144 gate and up, 3072 x 1024 down = 15,728,640.
    assert model.matrix_parameters == 28 * 15_728_640
    # 151,936 x 1024 embedding, shared with the head; norms: 28 x (2 x 1024 + 2 x 128) + 1024.
    assert model.sizes.num_parameters == 28 * 15_728_640 + 155_582_464 + 28 * 2304 + 1024 == 596_049_920
    assert model.weight_bytes == 1_192_099_840
    assert model.kv_bytes_per_token == 28 * 2 * 8 * 128 * 2 == 114_688
    assert model.flops_per_token == 2 * (28 * 15_728_640 + 155_582_464)


def test_the_floor_of_a_decode_step() -> None:
    model = make_model(QWEN3_06B)
    by_bytes = step_cost(model, Machine(1e9, 2e9, 1e30), [(99, 1), (199, 1)], num_sampled=2)
    weights = 2 * (28 * 15_728_640 + 155_582_464)
    activations = 28 * 2 * 2 * (1024 + 4096 + 2048 + 1024 + 1024 + 6144 + 3072 + 1024)
    logits = 2 * 2 * 151_936  # of two sequences: written, then read
    kv = (100 + 200 + 2) * 114_688  # read with the new tokens; the new tokens written
    assert by_bytes.bytes == weights + activations + 2 * logits + kv
    assert by_bytes.seconds == pytest.approx(by_bytes.bytes / 2e9)  # the better of copy and read
    head = 2 * 155_582_464 + logits
    parts = {"decode attention": kv, "products": by_bytes.bytes - kv - head - logits, "head": head, "sampler": logits}
    assert by_bytes.parts == pytest.approx({name: num_bytes / 2e9 for name, num_bytes in parts.items()})
    by_flops = step_cost(model, Machine(1e30, 1e30, 1e9), [(99, 1), (199, 1)], num_sampled=2)
    assert by_flops.flops == 2 * model.flops_per_token + 4 * 28 * 16 * 128 * 300
    assert by_flops.seconds == pytest.approx(by_flops.flops / 1e9)


def test_quantised_weights_are_read_in_a_byte_each_and_activations_are_not() -> None:
    model = make_model(QWEN3_06B)
    quantised = replace(model, quantized_itemsize=1)
    whole, half = (step_cost(one, Machine(1e9, 2e9, 1e30), [(99, 1)], num_sampled=1) for one in (model, quantised))
    assert whole.bytes - half.bytes == 28 * 15_728_640 + 155_582_464
    assert (quantised.weight_bytes, quantised.kv_bytes_per_token) == (596_049_920, 114_688)


def test_keys_and_values_are_read_in_a_byte_each_and_their_scales_in_four() -> None:
    model = make_model(QWEN3_06B)
    codes = replace(model, kv_dtype=torch.int8)
    whole, half = (step_cost(one, Machine(1e9, 2e9, 1e30), [(99, 1)], num_sampled=1) for one in (model, codes))
    assert codes.kv_bytes_per_token == 28 * 2 * 8 * (128 + 4)
    assert whole.bytes - half.bytes == 101 * (114_688 - codes.kv_bytes_per_token)


def test_a_window_is_all_that_attention_reads() -> None:
    for computed, scheduled, window in itertools.product((0, 3, 50), (1, 7, 40), (1, 5, 44, 200, None)):
        seen = [set(range(max(0, q + 1 - (window or 999)), q + 1)) for q in range(computed, computed + scheduled)]
        expected = len(set().union(*seen)), sum(map(len, seen))
        assert count_keys(computed, scheduled, window) == expected, (computed, scheduled, window)
    sliding = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 7}
    whole = make_model(QWEN3_06B)
    model = make_model(QWEN3_06B | sliding)
    assert model.windows == {None: 7, 100: 21} and whole.windows == {None: 28}
    machine = Machine(1e9, 2e9, 1e30)
    reads = [step_cost(one, machine, [(999, 1)], 0).parts["decode attention"] for one in (model, whole)]
    assert reads[0] / reads[1] == pytest.approx((7 * 1001 + 21 * 101) / (28 * 1001))


def test_the_floor_of_experts_reads_those_that_are_expected_to_be_touched() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = TINY | experts | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    model = make_model(config)
    dense = make_model(TINY)
    one = 3 * 64 * 16  # parameters of an expert
    assert model.sizes.num_parameters == dense.sizes.num_parameters + 2 * (8 * one + 8 * 64 - 3 * 64 * 96)
    assert model.matrix_parameters == dense.matrix_parameters + 2 * (2 * one + 8 * 64 - 3 * 64 * 96)
    slow = Machine(1.0, 1.0, 1e30)
    first, second = (
        step_cost(model, slow, [(0, n)], 0).bytes - step_cost(model, slow, [(0, 0)], 0).bytes for n in (1, 2)
    )
    per_token = (first - 2 * 2 * 2 * one) / 1  # all but the two experts of each of the two layers
    assert second == pytest.approx(2 * per_token + 2 * 2 * 8 * (1 - 0.75**2) * one)


def test_parts_of_a_floor_add_up_to_it() -> None:
    model = make_model(QWEN3_06B)
    machine = Machine(1e12, 2e12, 1e14)
    prompt = step_cost(model, machine, [(99, 1), (0, 50)], num_sampled=2)
    assert prompt.parts.keys() == {"prompts", "head", "sampler"}
    both = prompt + step_cost(model, machine, [(100, 1), (50, 1)], num_sampled=2)
    assert both.parts.keys() == {"prompts", "head", "sampler", "decode attention", "products"}
    for cost in (prompt, both):
        assert sum(cost.parts.values()) == pytest.approx(cost.seconds)


def test_ideal_steps_compute_every_token_once() -> None:
    lengths = [(10, 3), (7, 1), (30, 2), (1, 5)]
    steps = list(ideal_steps(lengths, max_num_seqs=2, max_num_batched_tokens=12))
    assert sum(count for work, _ in steps for _, count in work) == sum(n + m - 1 for n, m in lengths)
    assert sum(sampled for _, sampled in steps) == sum(m for _, m in lengths)
    assert all(len(work) <= 2 and sum(count for _, count in work) <= 12 for work, _ in steps)
    assert steps[0] == ([(0, 10), (0, 2)], 1)
    assert steps[1] == ([(10, 1), (2, 5)], 2)
    assert len(list(ideal_steps([(5, 4)], 8, 100))) == 4  # a prefill, which samples, and three decodes


def test_ideal_steps_compute_a_shared_prefix_once() -> None:
    (work, sampled), *_ = ideal_steps([(20, 2), (25, 2), (16, 2)], 8, 100, shared_prefix=16)
    assert work == [(0, 20), (16, 9), (15, 1)]
    assert sampled == 3


def test_a_tiny_run_ends_in_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(TINY, torch.float32, tmp_path)
    arguments = "--num-seqs 6 --input-len 3 20 --output-len 2 9 --dtype float32 --device cpu --shared-prefix 5"
    rates = "--machine-rates 1e10 2e10 1e12 --kvcache-block-size 16 --num-kvcache-blocks 300"
    bench.main(["--model", str(tmp_path), *arguments.split(), *rates.split()])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] not in " {"][:4] == ["machine", "model", "workload", "floor"]
    assert any("decode attention" in line and "prompts" in line for line in lines)
    document = json.loads(lines[-1])
    workload = make_workload(6, (3, 20), (2, 9), 500, shared_prefix=5)
    result = document["result"]
    assert result["num_output_tokens"] == sum(workload.output_lens)
    assert result["num_steps"] == max(workload.output_lens) == result["prefill"]["steps"] + result["decode"]["steps"]
    assert result["mean_batch"] == pytest.approx(sum(workload.output_lens) / result["num_steps"])
    assert result["percent_of_floor"] == pytest.approx(100 * document["floor"]["seconds"] / result["seconds"])
    # Nothing is shared with the warm-up; so what the steps cost is what the ideal steps do.
    floor = sum((result[phase]["floor_seconds"] for phase in ("prefill", "decode")), 0.0)
    assert floor == pytest.approx(document["floor"]["seconds"], rel=0.2)
    assert document["versions"]["torch"] == torch.__version__
    assert {"commit", "command", "machine", "threads", "rates", "cost"} <= document.keys()


@pytest.mark.slow
def test_the_package_alone_measures_with_the_same_presets(warm_python: WarmPython, tmp_path: Path) -> None:
    """As it is found in a wheel: without the project's other folders."""
    (tmp_path / "nanovllm").symlink_to(Path(bench.__file__).parent / "nanovllm")
    arguments = ["--preset", "cpu", "--model", "tiny-qwen3", "--num-seqs", "2", "--output-len", "2", "2"]
    arguments += ["--machine-rates", "1e10", "2e10", "1e12"]
    code = "import runpy; runpy.run_module('nanovllm', run_name='__main__', alter_sys=True)"
    done = warm_python.run(code, "bench", *arguments, cwd=tmp_path)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["result"]["num_output_tokens"] == 4 and document["command"] == " ".join(
        ["nanovllm", "bench", *arguments]
    )
    arguments_there = document["arguments"]
    arguments_there["max_num_seqs"] = None  # the engine's own number
    same = vars(bench.parse_arguments(arguments))
    assert {name: same[name] for name in arguments_there} == arguments_there


def test_a_checkpoint_of_random_weights_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_checkpoint(TINY, torch.bfloat16, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id is None
    assert sum(p.numel() for p in model.parameters()) == make_model(TINY).sizes.num_parameters


def run_here(command: list[str]) -> dict[str, Any]:
    """Run a worker's command in this process, which has imported transformers, and return the document it prints."""
    assert command[:2] == [sys.executable, "-m"]
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", command[2:]), redirect_stdout(printed):
        runpy.run_module(command[2], run_name="__main__")
    document: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return document


@pytest.mark.slow
def test_beside_transformers_ours_and_theirs_make_the_same_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_engine = bench_compare.run_engine
    monkeypatch.setattr(
        bench_compare,
        "run_engine",
        lambda command, *others: run_here(command) if "-m" in command else run_engine(command, *others),
    )
    write_checkpoint(TINY, torch.float32, tmp_path)
    arguments = "--num-seqs 4 --input-len 3 20 --output-len 2 9 --dtype float32 --compare transformers --repeat 1"
    bench.main(["--model", str(tmp_path), *arguments.split(), "--machine-rates", "1e10", "1e10", "1e12"])
    comparison = json.loads(capsys.readouterr().out.splitlines()[-1])["comparison"]
    tokens = {name: run[0]["num_output_tokens"] for name, run in comparison["runs"].items()}
    assert tokens.keys() == {"nanovllm", "transformers static", "transformers continuous"}
    assert set(tokens.values()) == {sum(make_workload(4, (3, 20), (2, 9), 500).output_lens)}


def test_costs_add_up() -> None:
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
