"""Estimates of what fits: the numbers are the model's own, and the answer names the option that would help."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.batch_jobs import write_lines
from helpers.paths import ROOT

from nanovllm.apps.cli import main
from nanovllm.apps.estimate import estimate, fetch_config, parse_size
from nanovllm.apps.floor import MACHINES, Machine
from nanovllm.config import EngineConfig
from nanovllm.models.sizes import Sizes

BF16 = torch.bfloat16
GIB = 1 << 30


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["estimate", *arguments])
    out, said = capsys.readouterr()
    return status, out + said


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama-2-7b-hf", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.3", 7_248_023_552),
    ],
)
def test_published_models_have_as_many_parameters_as_their_cards_say(name: str, parameters: int) -> None:
    assert Sizes(fetch_config(name)).num_parameters == parameters


@pytest.mark.parametrize(
    ("name", "ranks", "parameters", "int8", "kv", "row"),
    [
        ("qwen3-0.6b", 1, 596_049_920, 598_099_456, 114_688, 0),
        ("qwen3-0.6b", 2, 298_057_728, 299_229_952, 57_344, 0),
        ("qwen2.5-7b", 4, 1_904_057_344, 2_042_688_000, 14_336, 0),
        ("qwen3-30b-a3b", 4, 7_642_626_048, 7_793_770_880, 24_576, 0),
        ("qwen3.5-0.8b", 2, 376_224_288, 377_896_128, 6_144, 9_768_960),
    ],
)
def test_what_a_rank_holds(name: str, ranks: int, parameters: int, int8: int, kv: int, row: int) -> None:
    """The numbers come from formulas: of weights in int8, of a token's keys and values, and of a row's state."""
    from nanovllm.features.quantized.formats import INT8
    from nanovllm.features.quantized.loading import count_bytes

    sizes = Sizes(fetch_config(name), ranks)
    assert sizes.num_parameters == parameters
    assert sizes.weight_bytes(BF16) == 2 * parameters
    assert count_bytes(sizes.model, INT8, BF16.itemsize) == int8
    assert sizes.kv_bytes(BF16) == kv
    assert sizes.row_bytes(BF16) == row


def test_biases_and_shared_kv_heads_are_counted() -> None:
    """Four ranks share 16 heads, and each has one of two KV heads. The vocabulary is padded to 4 x 251."""
    config = fetch_config("qwen3-0.6b")
    plain = Sizes(config, 4).num_parameters
    config.attention_bias = True
    config.num_key_value_heads = 2
    config.vocab_size = 1001
    biases = (4 + 1 + 1) * 128 + 1024
    matrices = 2 * 128 * 1024  # of the second KV head, which is gone
    vocabulary = (151_936 // 4 - 251) * 1024
    assert Sizes(config, 4).num_parameters == plain + 28 * (biases - matrices) - vocabulary


def test_the_table_of_a_model_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run(capsys, "qwen3-8b", "--gpu-memory", "80GB", "--max-model-len", "8192")
    assert status == 0 and "It fits" in shown
    assert "8,190,735,360" in shown  # the parameters of Qwen/Qwen3-8B, as its model card has them: 8.2 billion
    assert "147,456 bytes" in shown  # 2 x 36 layers x 8 heads x 128 x 2 bytes


def test_the_kv_cache_is_what_the_budget_leaves_in_whole_blocks() -> None:
    config = EngineConfig("qwen3-8b", max_model_len=8192, kvcache_block_size=64)
    found = estimate(fetch_config("qwen3-8b"), config, 80 * GIB)
    assert found.kv_budget == int(80 * GIB * 0.9) - found.memory.weights - found.memory.activations
    assert found.num_tokens % 64 == 0
    assert 0 <= found.kv_budget - found.num_tokens * found.kv_bytes_per_token < 64 * found.kv_bytes_per_token
    assert found.num_sequences == found.num_tokens / 8192
    halved = estimate(
        fetch_config("qwen3-8b"), EngineConfig("qwen3-8b", max_model_len=8192, tensor_parallel_size=2), 80 * GIB
    )
    assert (
        halved.kv_bytes_per_token * 2 == found.kv_bytes_per_token
        and halved.memory.weights < 0.52 * found.memory.weights
    )
    asked = estimate(fetch_config("qwen3-8b"), replace(config, kvcache_memory_bytes=GIB), 80 * GIB)
    assert asked.kv_budget == GIB and "the KV cache gets kvcache_memory_bytes" in asked.describe()


def test_who_waits_is_counted_in_good_english() -> None:
    found = estimate(fetch_config("qwen3-0.6b"), EngineConfig("qwen3-0.6b", max_model_len=8192), 8 * GIB)
    most = int(found.num_sequences)
    endings = {
        most: f"It fits: {most} sequences at a time, each as long as it may be.",
        most + 1: "the other one waits, unless sequences are shorter.",
        most + 2: "the other 2 wait, or fewer of them if sequences are shorter.",
    }
    for asked, ending in endings.items():
        assert replace(found, config=replace(found.config, max_num_seqs=asked)).describe().endswith(ending)


def test_ranks_have_a_gpu_each_and_share_a_cpu() -> None:
    hf_config = fetch_config("qwen3-8b")
    on_gpus = EngineConfig("qwen3-8b", max_model_len=8192, tensor_parallel_size=4)
    on_cpu = replace(on_gpus, device="cpu", dtype="bfloat16", attention_backend="torch")
    gpu, cpu = (estimate(hf_config, config, 80 * GIB) for config in (on_gpus, on_cpu))
    assert (gpu.config.num_devices, gpu.memory.total) == (4, 80 * GIB)
    assert (cpu.config.num_devices, cpu.memory.total) == (1, 20 * GIB)
    assert Machine(1.0, 2.0, 3.0).times(gpu.config.num_devices) == Machine(4.0, 8.0, 12.0)


def test_one_byte_a_value_gives_1_9_times_the_tokens_in_the_same_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["qwen3-8b", "--gpu-memory", "80GB", "--max-model-len", "8192"]
    tokens = []
    for name in ("auto", "int8"):
        status, shown = run(capsys, *arguments, "--kv-cache-dtype", name)
        assert status == 0
        (line,) = (line for line in shown.splitlines() if "tokens in the KV cache" in line)
        tokens.append(int(line.split()[-1].replace(",", "")))
    assert f"{2 * 36 * 8 * (128 + 4):,} bytes" in shown
    assert 1.9 < tokens[1] / tokens[0] < 2


@pytest.mark.parametrize(
    ("arguments", "helps"),
    [
        (["qwen3-8b", "--gpu-memory", "24GB", "--max-model-len", "40960"], ["--max-model-len", "--tensor-parallel"]),
        (["qwen3-32b", "--gpu-memory", "24GB"], ["--tensor-parallel-size 4"]),
        (["qwen3-8b", "--gpu-memory", "24GB", "--dtype", "float32"], ["--dtype bfloat16"]),
        (["qwen3-8b", "--gpu-memory", "24GB", "--max-model-len", "30000"], ["--kv-cache-dtype int8"]),
        (
            [*("qwen3-0.6b", "--gpu-memory", "3.5GB", "--max-num-seqs", "2000"), "--max-model-len", "4096"],
            ["--max-num-seqs 64"],
        ),
        (["qwen3-32b", "--gpu-memory", "4GB"], ["no option alone, but a larger GPU"]),
    ],
)
def test_what_does_not_fit_is_told_with_options_that_do_help(
    arguments: list[str], helps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown = run(capsys, *arguments)
    assert status == 1 and "It does not fit" in shown
    assert all(option in shown for option in helps)
    advice = shown.split("What would help: ")[1].rstrip(".\n").split("; or ")
    for option in advice:
        if option.startswith("--"):
            status, shown = run(capsys, *arguments, *option.split())
            assert status == 0, f"{option} does not help"


def test_a_folder_a_config_json_and_the_model_in_the_box_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanovllm.features.shapes import preset_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset_config("qwen3-0.6b")))
    tables = [run(capsys, str(p), "--gpu-memory=8GB")[1].partition("\n")[2] for p in (path, tmp_path, "qwen3-0.6b")]
    assert tables[0] == tables[1] == tables[2]
    assert run(capsys, "tiny-qwen3", "--gpu-memory", "1GB")[0] == 0


def test_of_a_hub_id_configs_alone_are_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.features.shapes import preset_config

    def fetch(repo: str, allow_patterns: list[str], revision: str | None) -> str:
        fetched.append((repo, allow_patterns))
        (tmp_path / "config.json").write_text(json.dumps(preset_config("qwen3-4b")))
        return str(tmp_path)

    fetched: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert run(capsys, "someone/finetuned", "--gpu-memory", "24GB")[0] == 0
    configs = ["config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json"]
    assert fetched == [("someone/finetuned", configs)]


def test_an_id_that_names_a_shape_needs_no_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_: pytest.fail("something was fetched"))
    shown = [run(capsys, name, "--gpu-memory", "80GB") for name in ("Qwen/Qwen3-8B", "qwen3-8b")]
    assert shown[0][0] == 0
    assert shown[0][1].partition("\n")[2] == shown[1][1].partition("\n")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen3-8b", "--gpu-memory", "much"], "such as 80GB"),
        (["qwen3-8b", "--gpu-memory", "0GB"], "such as 80GB"),
        (["qwen3-8b", "--gpu-memory", "8GB", "--tensor-parallel-size", "3"], "cannot share"),
        (["no/such-model", "--gpu-memory", "8GB"], "neither a local folder, nor a shape"),
        (["qwen3-8b", "--gpu-memory", "80GB", "--quantization", "int8-dynamic"], 'use quantization="w8a8"'),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run(capsys, *arguments)
    assert status == 2 and words in shown


def test_a_cpu_gives_the_cache_a_quarter_of_what_is_left_or_what_the_user_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = EngineConfig("qwen3-8b", device="cpu", dtype="bfloat16", attention_backend="torch", max_model_len=8192)
    found = estimate(fetch_config("qwen3-8b"), config, 24 * GIB)
    assert found.kv_budget == (24 * GIB - found.memory.weights - found.memory.activations) // 4
    assert estimate(fetch_config("qwen3-8b"), config, 256 * GIB).kv_budget == 4 * GIB
    assert estimate(fetch_config("tiny-qwen3"), config, None).fits, "into what is free here"
    arguments = ["qwen3-8b", "--device", "cpu", "--memory", "64", "--max-model-len", "40960", "--dtype", "bfloat16"]
    status, shown = run(capsys, *arguments)
    advice, _, _ = shown.split("What would help: ")[1].partition(".\n")  # a first use of the CPU kernels logs more
    (option,) = (o for o in advice.split("; or ") if "kvcache-memory" in o)
    assert status == 1 and "tensor-parallel" not in shown
    assert run(capsys, *arguments, *option.split())[0] == 0


def test_the_tokens_and_steps_of_a_job_are_those_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in"
    lines = [{"prompt": f"count from {i} to 30", "max_tokens": 3 + i, "ignore_eos": True} for i in range(9)]
    rest = [{"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}, {"promt": ""}]
    write_lines(source, lines + rest)
    options = ["--device", "cpu", "--max-tokens", "5"]
    status, shown = run(capsys, "tiny-qwen3", *options, "--machine", "laptop", "--input", str(source))
    stats = tmp_path / "stats"
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", "tiny-qwen3", "--stats"]
    assert main([*command, str(stats), *options]) == 1 and status == 0
    counts = json.loads(stats.read_text())
    assert "10 requests, and 1 lines that cannot run" in shown
    tokens = (counts["num_prompt_tokens"], counts["num_generated_tokens"])
    assert "{:,} of prompts, at most {:,} of answers".format(*tokens) in shown
    assert re.search(r"steps +11\n", shown), "as many as the longest answer has tokens"
    *_, seconds = re.findall(r"least time +([\d.]+) s", shown)
    assert 0 < float(seconds) < 1
    assert "max_tokens" not in shown, "every line has a limit"
    assert run(capsys, "qwen3-8b", "--memory", "80", "--input", str(source))[0] == 2


def test_a_job_is_estimated_with_the_tokenizer_of_its_option(
    reciter: Path, random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "abc", "max_tokens": 3}])
    options = ["--device", "cpu", "--machine", "laptop", "--input", str(source)]
    assert run(capsys, str(random_model), *options)[0] == 2, "it has no tokenizer"
    status, shown = run(capsys, str(random_model), *options, "--tokenizer", str(reciter))
    assert status == 0 and "3 of prompts, at most 3 of answers" in shown


def test_a_job_whose_lines_have_no_max_tokens_is_estimated_at_a_typical_length_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    short = {**chat, "custom_id": "c", "body": {**chat["body"], "max_tokens": 9}}
    null = {**chat, "custom_id": "d", "body": {**chat["body"], "max_completion_tokens": None}}
    write_lines(tmp_path / "in", [{**chat, "custom_id": "a"}, {**chat, "custom_id": "b"}, short, null])
    options = ["--device", "cpu", "--machine", "laptop", "--max-model-len", "512", "--input", str(tmp_path / "in")]
    status, shown = run(capsys, "tiny-qwen3", *options, "--typical-output", "40")
    assert status == 0 and "3 lines have no max_tokens: they count up to 512 tokens with their prompts" in shown
    (prompts,) = set(re.findall(r"([\d,]+) of prompts", shown))
    most = 3 * (512 - int(prompts) // 4) + 9
    assert re.findall(r"([\d,]+) of answers", shown) == [f"{most:,}", str(3 * 40 + 9)]
    whole, typical = map(float, re.findall(r"least time +([\d.]+) s", shown))
    assert typical < whole / 4
    assert "end after 256 tokens" in run(capsys, "tiny-qwen3", *options)[1]
    assert run(capsys, "tiny-qwen3", *options, "--typical-output", "0")[0] == 2


def test_a_length_that_is_left_out_is_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run(capsys, "qwen3-8b", "--gpu-memory", "24GB")
    (length,) = map(int, re.findall(r"sequences of ([\d,]+) tokens", shown.replace(",", "")))
    assert (
        status == 0 and "It fits: 1 of 512 sequences (max_num_seqs) at full length" in shown and 4096 < length < 40960
    )
    assert run(capsys, "qwen3-8b", "--gpu-memory", "24GB", "--max-model-len", str(length))[0] == 0
    assert run(capsys, "qwen3-8b", "--gpu-memory", "24GB", "--max-model-len", str(length + 1))[0] == 1
    assert "sequences of 40,960 tokens" in run(capsys, "qwen3-8b", "--gpu-memory", "80GB")[1]


def test_machines_are_those_of_the_sites_estimator() -> None:
    page = (ROOT / "docs" / "estimator.html").read_text()
    shown = re.findall(r'\["(cpu|gpu)", (\d+), (\d+), ([\d.]+)\]', page)
    expected = [(device.replace("cuda", "gpu"), *map(str, rest)) for device, *rest in MACHINES.values()]
    assert shown == expected


def test_sizes_are_read_as_makers_of_gpus_write_them() -> None:
    assert parse_size("80GB") == parse_size("80 GiB") == parse_size("80g") == 80 * GIB
    assert parse_size("1.5T") == 1536 * GIB and parse_size("512MiB") == GIB // 2 and parse_size("2048") == 2048
    assert parse_size("24") == parse_size(" 24 ") == 24 * GIB and parse_size("1.5") == 1.5 * GIB
