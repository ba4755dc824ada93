"""A model in GGUF stands wherever a folder stands: in commands, jobs, drafts, sleep and estimates."""

import json
import os
import re
import shutil
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gguf_models import describe_tokenizer, draw_matrix, save_gguf, write_gguf
from helpers.paths import BOX_MODEL
from helpers.tiny import CROWDED, SMALL, draw_prompts, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.inputs import LoRARequest

gguf = pytest.importorskip("gguf")

OPTIONS = SMALL | {"device": "cpu", "attention_backend": "torch"}
PROMPTS = draw_prompts([5, 33, 64])
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def say(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gguf(path, types=lambda name: "Q6_K" if "attn_v" in name or "embd" in name else "Q4_K")
    return path


@pytest.fixture(scope="module")
def tokens(path: Path) -> list[list[int]]:
    with LLM(path, **OPTIONS) as llm:
        return say(llm)


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic", "w8a8", "awq"])
def test_another_quantisation_is_refused_by_name(path: Path, quantization: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization is '{quantization}', and the checkpoint .*gguf"):
        LLM(path, quantization=quantization, **OPTIONS)


def test_adapters_and_new_weights_are_refused_as_for_awq(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint is quantised already: an adapter"):
        LLM(path, lora=str(tmp_path), **OPTIONS)
    with LLM(path, quantization="gguf", **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"the checkpoint is quantised already \(gguf\)"):
            llm.generate(PROMPTS, PARAMS, lora_request=LoRARequest("one", 1, str(tmp_path)))
        with pytest.raises(RuntimeError, match=r"the engine's checkpoint is quantised \(gguf\)"):
            llm.load_weights([("model.norm.weight", torch.ones(256))])


def test_who_sleeps_reads_the_file_again(path: Path, tokens: list[list[int]]) -> None:
    with LLM(path, **OPTIONS) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        assert say(llm) == tokens


@pytest.mark.parametrize("change", ["shorter", "gone"])
def test_a_file_that_changed_behind_its_header_is_refused_by_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    from nanovllm.features.gguf.tensors import TensorFile

    own = shutil.copy(path, tmp_path / "model.gguf")
    read = TensorFile.__init__

    def spoil(self: TensorFile, file: Path, tensors: Any) -> None:
        file.unlink() if change == "gone" else os.truncate(file, 100_000)
        read(self, file, tensors)

    monkeypatch.setattr(TensorFile, "__init__", spoil)
    with pytest.raises(ValueError, match=f"{own} cannot be read: "):
        LLM(own, **OPTIONS)


def test_a_draft_model_in_gguf_changes_no_token(path: Path, tokens: list[list[int]]) -> None:
    with LLM(path, speculative_config={"model": str(path), "num_speculative_tokens": 2}, **OPTIONS) as llm:
        assert say(llm) == tokens


def test_random_weights_need_no_more_than_the_header(path: Path) -> None:
    with LLM(path, load_format="dummy", **OPTIONS) as llm:
        assert [len(ids) for ids in say(llm)] == [8, 8, 8]


def test_a_job_notices_that_a_number_of_any_part_has_changed(tmp_path: Path) -> None:
    from nanovllm.apps.jobs.provenance import read_provenance

    save_gguf(tmp_path / "m.gguf", types="Q8_0", num_files=2)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 2
    digests = []
    for part in (None, *parts):
        if part is not None:
            data = bytearray(part.read_bytes())
            data[-40] ^= 1
            part.write_bytes(data)
        with LLM(parts[0], **OPTIONS) as llm:
            digests.append(read_provenance(llm.engine)["model"])
    assert len(set(digests)) == 3


SAMPLING = {
    "mirostat": (2, "mirostat (2)"),
    "xtc_probability": (0.5, "xtc_probability (0.5)"),
    "sequence": ("top_k;temperature", "sequence ('top_k;temperature')"),
    "penalty_last_n": (64, "penalty_last_n (64)"),
}


@pytest.mark.parametrize("key", SAMPLING)
def test_sampling_that_the_engine_does_not_have_is_refused_where_nothing_else_is_given(
    tmp_path: Path, key: str
) -> None:
    """As generation_config.json's keys are: the file loads, and requests with parameters run."""
    value, words = SAMPLING[key]
    own = {key: value, "penalty_repeat": 1.25, "mirostat_tau": 5.0, "xtc_threshold": 0.1}
    path = tmp_path / "model.gguf"
    save_gguf(path, metadata={f"general.sampling.{name}": number for name, number in own.items()})
    with LLM(path, **OPTIONS) as llm:
        assert len(say(llm)) == 3
        with pytest.raises(ValueError, match=re.escape(f"{path}: this engine does not have {words}: give Sampling")):
            llm.generate(PROMPTS, use_tqdm=False)


def test_sampling_that_asks_for_nothing_is_no_obstacle(tmp_path: Path) -> None:
    own = {"mirostat": 0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "penalty_last_n": 64, "penalty_repeat": 1.0}
    save_gguf(tmp_path / "model.gguf", metadata={f"general.sampling.{name}": number for name, number in own.items()})
    with LLM(tmp_path / "model.gguf", **OPTIONS) as llm:
        assert llm.get_default_sampling_params().repetition_penalty == 1


def test_a_split_file_says_what_the_whole_one_says(tmp_path: Path) -> None:
    whole = save_gguf(tmp_path / "m.gguf", types="Q8_0", num_files=3)
    for part in sorted(tmp_path.glob("m-*.gguf"))[::2]:
        with LLM(part, **OPTIONS) as llm:
            assert say(llm) == [greedy(whole, prompt, 8) for prompt in PROMPTS]


def test_an_estimate_has_the_bytes_of_the_file(tmp_path: Path) -> None:
    """It says those of the tensors, and the memory that they take: Q4_K's scales of 6 bits have a byte each here."""
    from nanovllm.apps.estimate import estimate, fetch_config
    from nanovllm.config import EngineConfig

    for types in ("Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "F16"):
        path = tmp_path / f"{types}.gguf"
        save_gguf(path, types=types)
        asked = EngineConfig.from_options(str(path), {"device": "cpu", "dtype": "float16"})
        found = estimate(fetch_config(str(path)), asked, 64 << 30)
        size = path.stat().st_size
        assert found.memory.weights == pytest.approx(size, rel=0.03), types
        (told,) = re.findall(r"; (\S+) GiB in the file", found.format)
        assert float(told) == pytest.approx(size / 2**30, rel=0.02, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_ranks_stages_and_replicas_say_what_one_process_says(tmp_path: Path, split: str) -> None:
    """Llama's rows of queries and keys are put into another order, and each rank takes its share of them."""
    path = tmp_path / "model.gguf"
    kinds = {"attn_v": "Q6_K", "output.": "Q6_K"}
    model = save_gguf(
        path,
        "llama",
        lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_K"),
        hidden_size=512,
    )
    with LLM(path, **OPTIONS | {split: 2}) as llm:
        assert say(llm) == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("command", ["doctor", "estimate"])
def test_commands_take_a_file(path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from nanovllm.apps.cli import main

    options = ["--device", "cpu", "--memory", "8GB"] if command == "estimate" else []
    assert main([command, str(path), *options]) == 0
    assert re.search("natively", capsys.readouterr().out)


def test_a_job_runs(path: Path, tmp_path: Path) -> None:
    from nanovllm.apps.cli import main

    line: dict[str, Any] = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    command = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    options = ["--model", str(path), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "112"]
    assert main([*command, *options]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200


def test_pooling_is_that_of_the_metadata(tmp_path: Path) -> None:
    for kind, mode in ((3, "last"), (1, "mean"), (2, "first")):
        save_gguf(tmp_path / f"{mode}.gguf", metadata={"qwen3.pooling_type": kind})
        with LLM(tmp_path / f"{mode}.gguf", **OPTIONS) as llm:
            assert llm.engine.facts.pooling.mode == mode
    save_gguf(tmp_path / "rank.gguf", metadata={"qwen3.pooling_type": 4})
    with LLM(tmp_path / "rank.gguf", **OPTIONS) as llm, pytest.raises(ValueError, match="ranks texts"):
        llm.embed(PROMPTS)


def write_large(path: Path, types: dict[str, str]) -> int:
    """Write a model whose head and embedding are its largest matrices; returns the bytes of one with 16 bits."""
    sizes = {"block_count": 6, "embedding_length": 2048, "feed_forward_length": 6144, "context_length": 128}
    sizes |= {"attention.head_count": 16, "attention.head_count_kv": 8, "attention.key_length": 128}
    vocab = 32768
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        type_name = types.get(name.split(".")[-2], types[""]) if len(shape) > 1 else "F32"
        values = np.ones(shape, np.float32) if type_name == "F32" else np.zeros(shape, np.float16)
        raw = values if type_name == "F32" else draw_matrix(type_name, values, rng, 0.02)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[type_name])

    add("token_embd.weight", vocab, 2048)
    for block in range(6):
        for name, *shape in (("attn_q", 2048, 2048), ("attn_k", 1024, 2048), ("attn_v", 1024, 2048)):
            add(f"blk.{block}.{name}.weight", *shape)
        for name, *shape in (("attn_output", 2048, 2048), ("ffn_gate", 6144, 2048), ("ffn_up", 6144, 2048)):
            add(f"blk.{block}.{name}.weight", *shape)
        add(f"blk.{block}.ffn_down.weight", 2048, 6144)
        add(f"blk.{block}.attn_norm.weight", 2048)
        add(f"blk.{block}.ffn_norm.weight", 2048)
    add("output_norm.weight", 2048)
    add("output.weight", vocab, 2048)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return vocab * 2048 * 2


@pytest.mark.slow
@pytest.mark.parametrize("types", [{"": "Q4_K", "output": "Q6_K"}, {"": "Q8_0"}, {"": "Q4_0", "ffn_down": "IQ3_S"}])
def test_loading_holds_the_packed_size_and_two_of_the_largest_matrices(tmp_path: Path, types: dict[str, str]) -> None:
    """The file itself is mapped: its pages are the operating system's.

    A load leaves 6 to 9 MB beside the weights. The allowance of 64 is for what other processors' threads may keep.
    """
    from benchmarks.evidence.bench_loading import measure
    from nanovllm.apps.estimate import estimate, fetch_config
    from nanovllm.config import EngineConfig

    path = tmp_path / "large.gguf"
    largest = write_large(path, types)
    asked = EngineConfig.from_options(str(path), {"device": "cpu", "dtype": "bfloat16"})
    packed = estimate(fetch_config(str(path)), asked, 64 << 30).memory.weights
    found = measure(path, "cpu", "gguf")
    assert found["most"] < packed + 2 * largest
    assert found["held"] < packed + 64 * 10**6


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a GGUF, with its tokenizer, its template and its defaults of sampling."""
    path = tmp_path_factory.mktemp("box") / "box.gguf"
    metadata = describe_tokenizer(BOX_MODEL, "qwen2", 664)
    metadata |= {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    model = AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float32)
    write_gguf(path, model, "qwen3", "BF16", metadata)
    return path


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: SUMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{a}} + {{b}} ="
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: brier_score}]
"""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task. The harness's own tasks are left out: it reads them for seconds."""
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(
        tasks.TaskManager, "__init__", partialmethod(tasks.TaskManager.__init__, include_defaults=False)
    )
    monkeypatch.setattr(sys, "argv", [])  # the command sets it
    rows = [{"a": a, "b": 3, "choices": [str(a + 3), str(a + 4)], "answer": 0} for a in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.replace("SUMS", str(tmp_path / "sums.jsonl")))
    return tmp_path


def run_eval(model: Path, sums: Path) -> tuple[float, float]:
    """Return the accuracy and the Brier score, which has the log-probability of each choice in it."""
    from nanovllm.apps.cli import main

    place = sums / model.stem
    command = ["eval", "--model", str(model), "dtype=float32", "max_model_len=192", "--include_path", str(sums)]
    assert main([*command, "--tasks", "sums", "--output_path", str(place)]) == 0
    (results,) = place.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["sums"]
    return found["acc,none"], found["brier_score,none"]


@pytest.mark.slow
def test_eval_measures_of_a_gguf_what_it_measures_of_the_folder(box: Path, sums: Path) -> None:
    assert run_eval(box, sums) == run_eval(BOX_MODEL, sums)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_eval_measures_of_a_quantised_gguf_what_hf_measures_of_its_weights(box: Path, sums: Path, kind: str) -> None:
    """The tolerance is that of tests/api/test_lm_eval.py. The file in BF16 is farther away, so the rounding is seen."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from benchmarks.gguf_files import quantize_with_package

    path = sums / f"{kind}.gguf"
    quantize_with_package(box, path, kind)
    weights = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }
    model = AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(weights[names.get_name(name, (".weight",))].copy())
    hf = HFLM(model, tokenizer=AutoTokenizer.from_pretrained(BOX_MODEL), max_length=192, batch_size=4)
    manager = TaskManager(include_path=str(sums))
    expected = simple_evaluate(hf, tasks=["sums"], task_manager=manager, bootstrap_iters=0)["results"]["sums"]
    accuracy, brier_score = run_eval(path, sums)
    assert accuracy == expected["acc,none"]
    assert brier_score == pytest.approx(expected["brier_score,none"], rel=1e-3)
    if kind == "Q4_0":
        assert run_eval(box, sums)[1] != pytest.approx(brier_score, rel=1e-2)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The built-in model in a mixture of types, and a folder with the numbers that this file means."""
    home = tmp_path_factory.mktemp("twins")
    kinds = {"attn_v": "Q8_0", "attn_k": "F16", "token_embd": "Q8_0", "ffn_down": "Q5_1"}
    model = AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float32)
    metadata = describe_tokenizer(BOX_MODEL, "qwen2", 664)
    write_gguf(
        home / "box.gguf",
        model,
        "qwen3",
        lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_1"),
        metadata,
    )
    shutil.copytree(BOX_MODEL, home / "folder", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(home / "folder")
    return home / "box.gguf", home / "folder"


USES: dict[str, dict[str, Any]] = {
    "a prefix cache": {},
    "chunks and preemption": CROWDED | {"num_kvcache_blocks": 10},
    "keys and values in one byte": {"kv_cache_dtype": "int8"},
    "drafts from the text": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "a draft model in GGUF": {
        "speculative_config": {"model": "", "num_speculative_tokens": 2},
        "attention_backend": "cpu",
    },
    "the C++ kernels": {"attention_backend": "cpu"},
}
SHORT = ("a draft model in GGUF", "the C++ kernels")


@pytest.mark.parametrize("use", [pytest.param(use, marks=[] if use in SHORT else [pytest.mark.slow]) for use in USES])
def test_unlike_types_say_what_a_folder_with_their_numbers_says(twins: tuple[Path, Path], use: str) -> None:
    """Greedy, drawn and structured answers, twice, with a prefix in common; scores and vectors; after a sleep, too."""
    prompts = [f"count from {first} to 9, please, and then from 1 to {first}" for first in range(1, 7)]
    greedily = SamplingParams(temperature=0, max_tokens=16)
    digits = SamplingParams(temperature=0, max_tokens=16, structured_outputs={"regex": r"([0-9], ){3,5}[0-9]"})
    params = [greedily, digits, SamplingParams(seed=5, max_tokens=16)] * 2
    told = []
    for model in twins:
        options = OPTIONS | {"max_model_len": 160, "attention_backend": "torch"} | USES[use]
        if use == "a draft model in GGUF":
            options["speculative_config"] = USES[use]["speculative_config"] | {"model": str(twins[0])}
        with LLM(model, **options) as llm:
            answers = [
                output["token_ids"] for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)
            ]
            scores = [one["logprobs"] for one in llm.score(prompts, [" 1, 2, 3"] * 6, use_tqdm=False)]
            vectors = [one["embedding"] for one in llm.embed(prompts, use_tqdm=False)]
            llm.sleep(level=2)
            llm.wake_up()
            answers += [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
            assert answers[:6] == answers[6:12] == answers[12:]
            assert (llm.engine.stats()["num_preemptions"] > 0) == (use == "chunks and preemption")
        told.append((answers, np.array(scores), np.array(vectors)))
    assert told[0][0] == told[1][0]
    for found, expected in zip(told[0][1:], told[1][1:], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_the_built_in_model_as_a_gguf_answers_as_its_folder_does(box: Path) -> None:
    """Texts, prompts, ends of answers, scores and vectors: all of it is the same."""
    told = []
    for model in ("tiny-qwen3", box):
        with LLM(model, **OPTIONS | {"max_model_len": 256}) as llm:
            talk = [{"role": "user", "content": "What is 5 + 6?"}]
            answer = llm.chat(talk, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
            [drawn] = llm.generate(["count from 3 to 9"], SamplingParams(seed=3, max_tokens=8), use_tqdm=False)
            score = llm.score("count from 3", " to 9", use_tqdm=False)[0]
            vector = llm.embed(["hello"], use_tqdm=False)[0]["embedding"].tolist()
            facts = llm.engine.facts
            said = [answer["text"], answer["finish_reason"], answer["prompt_token_ids"], drawn["token_ids"]]
            told.append((*said, score["logprobs"], vector, facts.eos_token_ids, facts.default_params.top_k))
            assert facts.default_params.temperature == pytest.approx(0.6)
    assert told[0] == told[1]


def test_a_job_of_texts_runs_and_is_estimated(
    box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.apps.cli import main
    from nanovllm.apps.floor import Machine

    monkeypatch.setattr("nanovllm.apps.estimate.measure_machine", lambda *_: Machine(1e10, 1e10, 1e12))
    talk = [{"role": "user", "content": "hello"}]
    line: dict[str, Any] = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": "m", "messages": talk, "max_tokens": 4, "temperature": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    source = ["-i", str(tmp_path / "in.jsonl")]
    options = ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "112"]
    assert main(["run-batch", *source, "-o", str(tmp_path / "out.jsonl"), "--model", str(box), *options]) == 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert answer["choices"][0]["message"]["content"]
    assert main(["estimate", str(box), "--device", "cpu", "--memory", "8GB", "--input", source[1]]) == 0
    assert "1 requests" in capsys.readouterr().out
