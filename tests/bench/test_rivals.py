"""bench.py --compare: what workers are told, what becomes of their answers, what is said where one cannot run."""

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.warm import WarmPython

import bench
from benchmarks import bench_compare
from benchmarks.bench_compare import RIVALS, Rival, compare
from benchmarks.rivals import worker
from nanovllm.apps.bench import Workload
from nanovllm.apps.floor import Machine

MACHINE = Machine(1.0, 2.0, 3.0)
WORKLOAD = Workload([[1, 2, 3], [4]], [5, 2])


def answer(seconds: float, num_tokens: int = 7, **more: Any) -> str:
    document = {"seconds": seconds, "num_output_tokens": num_tokens, "load_seconds": 1.0, "warm_up_seconds": 0.5}
    return f"print('noise'); print({json.dumps(document | {'versions': {}} | more)!r})"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Compares stand-ins, each a program, with another as our own engine; returns what compare() does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')

    def run(lines: dict[str, str], *options: str) -> dict[str, Any]:
        args = bench.parse_arguments(["--model", str(tmp_path), "--compare", "transformers", *options])
        monkeypatch.setattr(
            bench_compare,
            "_commands",
            lambda *_: {line: [sys.executable, "-c", code] for line, code in lines.items()},
        )
        return compare(args, None, WORKLOAD, torch.float32, MACHINE)

    return run


def test_medians_and_ratios_are_of_the_runs_and_each_engine_has_its_turn(stand_in: Any, tmp_path: Path) -> None:
    turns = tmp_path / "turns"

    def varying(name: str, *seconds: float) -> str:
        took = f"{seconds}[open({str(turns)!r}).read().split().count({name!r}) - 1]"
        note = f"f = open({str(turns)!r}, 'a'); f.write('{name} '); f.close()"
        return f"{note}; {answer(0.5)[:-1]}.replace('\"seconds\": 0.5', '\"seconds\": ' + str({took})))"

    result = stand_in({"nanovllm": varying("a", 1.0, 4.0, 2.0), "other": varying("b", 7.0, 3.5, 14.0)})
    assert result["medians"] == {"nanovllm": 3.5, "other": 1.0}
    assert result["ratios"] == {"nanovllm": 1.0, "other": 3.5}
    assert turns.read_text() == "a b a b a b "


@pytest.mark.slow
def test_what_cannot_run_is_one_sentence_and_the_others_go_on(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = stand_in(
        {
            "nanovllm": answer(1.0),
            "says so": 'print(\'{"cannot_run": "it has no such type"}\')',
            "raises": "raise KeyError('weights')",
            "falls silent": "import os; os._exit(3)",
            "is short": answer(1.0, num_tokens=6),
            "hangs": "import time; print('still loading', flush=True); time.sleep(600)",
            "runs": answer(2.0, note="weights Q8_0"),
        },
        "--repeat",
        "2",
        "--run-seconds",
        "4",
    )
    out = capsys.readouterr().out
    log = tmp_path / "cache" / "nanovllm" / "bench" / "raises.log"
    assert result["left_out"] == {
        "says so": "it has no such type",
        "raises": f"it failed, with all it said in {log}: KeyError: 'weights'",
        "falls silent": f"it failed, with all it said in {log.with_name('falls-silent.log')}: exit 3",
        "is short": "it made 6 of 7 tokens",
        "hangs": "it had not ended after 4 seconds, start included (--run-seconds), with all it said in "
        f"{log.with_name('hangs.log')}",
    }
    assert "Traceback" in log.read_text() and "Traceback" not in out
    assert log.with_name("hangs.log").read_text() == "still loading\n"
    assert out.count("left out") == 5  # and none of them is tried again
    assert result["ratios"] == {"nanovllm": 1.0, "runs": 2.0}
    assert next(line for line in out.splitlines() if line.startswith("runs ")).endswith("weights Q8_0")


UPSTREAM = """
from nanovllm.engine import llm_engine

class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens):
        assert ignore_eos
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, max_model_len, max_num_seqs):
        assert llm_engine.AutoTokenizer.from_pretrained(model, use_fast=True).eos_token_id == -1

    def generate(self, prompts, params, use_tqdm):
        return [{"token_ids": prompt[:1] * one.max_tokens} for prompt, one in zip(prompts, params, strict=True)]
"""


@pytest.mark.parametrize("is_there", [True, False])
def test_nano_vllm_is_measured_although_its_package_has_our_name(
    is_there: bool, warm_python: WarmPython, tmp_path: Path
) -> None:
    if is_there:
        (tmp_path / "nanovllm" / "engine").mkdir(parents=True)
        (tmp_path / "nanovllm" / "__init__.py").write_text(UPSTREAM)
        (tmp_path / "nanovllm" / "engine" / "llm_engine.py").write_text("AutoTokenizer = None")
    spec = dict.fromkeys(("max_num_batched_tokens", "tensor_parallel_size"))
    spec |= {"device": "cuda", "model": "m", "max_model_len": 64, "max_num_seqs": 2, "temperature": 0.6}
    spec |= {"workload": vars(WORKLOAD), "warm_up": vars(WORKLOAD)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    code = (
        f"import runpy, sys; sys.path.insert(1, {str(tmp_path)!r}); "
        "runpy.run_module('benchmarks.rivals.nano_vllm', run_name='__main__', alter_sys=True)"
    )
    result = warm_python.run(code, str(tmp_path / "spec.json"), "", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    if is_there:
        assert document["num_output_tokens"] == 7
        assert set(document["versions"]) == {"nano-vllm", "torch"}
    else:
        assert "no nano-vLLM of its own" in document["cannot_run"]


COMPARE_WITH_SLEEPERS = '''
import os, sys
from pathlib import Path
import torch
import bench
from benchmarks import bench_compare
from nanovllm.apps.floor import Machine
from nanovllm.apps.bench import Workload

def compare_with_a_sleeper(folder):
    sleeper = f"""
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
open({str(folder / "group")!r}, "w").write(str(os.getpgid(0)) + " ")
time.sleep(600)
"""
    bench_compare._commands = lambda *_: {"nanovllm": [sys.executable, "-c", sleeper]}
    args = bench.parse_arguments(["--model", str(folder), "--compare", "transformers"])
    bench_compare.compare(args, None, Workload([[1]], [1]), torch.float32, Machine(1.0, 2.0, 3.0))

pids = []
for folder in sys.argv[1:]:
    pids.append(os.fork())
    if pids[-1] == 0:
        compare_with_a_sleeper(Path(folder))
        os._exit(0)
print(*pids, flush=True)
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
'''
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def count_group(group: int) -> int:
    """Count the living processes of a process group."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, found = path.read_text().rpartition(")")[2].split()[:3]
            count += int(found) == group and state not in "ZX"
    return count


@pytest.mark.slow
def test_a_comparison_that_a_signal_ends_takes_its_rival_along(tmp_path: Path) -> None:
    """As `timeout 60 python bench.py --compare ...` does; the rival has a child of its own. Each signal ends one."""
    folders = [tmp_path / number.name for number in SIGNALS]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text('{"vocab_size": 50}')
    command = [sys.executable, "-c", COMPARE_WITH_SLEEPERS, *map(str, folders)]
    notes = [folder / "group" for folder in folders]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        while not all(note.exists() and note.read_text().endswith(" ") for note in notes) and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        groups = [int(note.read_text()) for note in notes]
        assert [count_group(group) for group in groups] == [2, 2, 2]
        assert process.stdout is not None
        for pid, number in zip(process.stdout.readline().split(), SIGNALS, strict=True):
            os.kill(int(pid), number)
        statuses, _ = process.communicate(timeout=300)
    assert len(statuses.split()) == 3 and "0" not in statuses.split()
    deadline = time.monotonic() + 60
    while any(map(count_group, groups)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(count_group, groups))


def test_our_own_failure_is_not_hidden(stand_in: Any) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'ours'"):
        stand_in({"nanovllm": "raise KeyError('ours')"})


@pytest.mark.parametrize("name", [name for name, rival in RIVALS.items() if rival.script])
def test_an_interpreter_without_the_rival_is_refused_with_what_makes_one(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = RIVALS[name]
    monkeypatch.setitem(RIVALS, name, Rival("no_such_package", rival.script, rival.modes))
    for python in (sys.executable, str(tmp_path / "none")):
        with pytest.raises(SystemExit):
            bench.parse_arguments(["--compare", name, f"--{name}-python", python])
        message = capsys.readouterr().err
        assert f"--{name}-python is {python!r}, which has no no_such_package: `{rival.script} DIR` makes one" in message
    assert (ROOT / "benchmarks" / "rivals" / f"{name.replace('-', '_')}.py").is_file()


STUB = """#!/bin/sh
echo "$@" >> "$LOG"
case $2 in venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;; esac
"""


@pytest.mark.parametrize("name", [name for name, rival in RIVALS.items() if rival.script])
def test_the_script_of_a_rival_installs_it_in_the_version_that_is_asked_for(name: str, tmp_path: Path) -> None:
    stub = tmp_path / "python3"
    log = tmp_path / "log"
    rival = RIVALS[name]
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "CXX": "sh"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*rival.script.split(), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert (done := run(str(tmp_path / "env"), "1.2.3")).returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert lines[0] == f"-m venv {tmp_path / 'env'}"
    assert sum(line.endswith(("==1.2.3", "@1.2.3")) and " pip install " in line for line in lines) == 1
    assert lines[-1].startswith("-c import ") and rival.package in lines[-1]
    for wrong in ((), ("--help",), ("-x",)):
        assert (done := run(*wrong)).returncode == 2 and f"{name} (" in done.stderr + done.stdout


def test_every_line_runs_its_rivals_interpreter_with_its_mode(tmp_path: Path) -> None:
    args = bench.parse_arguments(["--num-seqs", "7", "--compare", "transformers"])
    args.compare = ["llama-cpp", "transformers"]
    args.llama_cpp_python = "L"
    commands = bench_compare._commands(args, tmp_path, torch.bfloat16, MACHINE, tmp_path / "spec")
    worker_of = "benchmarks.rivals.llama_cpp"
    assert commands["llama-cpp"] == ["L", "-m", worker_of, str(tmp_path / "spec"), ""]
    assert commands["llama-cpp Q8_0"] == ["L", "-m", worker_of, str(tmp_path / "spec"), "q8_0"]
    assert commands["transformers static"][0] == sys.executable
    again = bench.parse_arguments(commands["nanovllm"][2:])
    assert (again.num_seqs, again.input_len, again.model) == (7, [100, 1024], str(tmp_path))
    assert (again.machine_rates, again.compare) == ([1.0, 2.0, 3.0], None)


def test_quantised_weights_are_measured_beside_our_own_without(stand_in: Any, tmp_path: Path) -> None:
    args = bench.parse_arguments(["--compare", "transformers", "--quantization", "int8"])
    args.compare = ["llama-cpp"]
    args.lines = ["llama-cpp Q4_0"]
    commands = bench_compare._commands(args, tmp_path, torch.bfloat16, MACHINE, tmp_path / "spec")
    assert list(commands) == ["nanovllm", "nanovllm int8", "llama-cpp Q4_0"]
    quantised = bench.parse_arguments(commands["nanovllm int8"][2:])
    assert (quantised.quantization, quantised.compare) == ("int8", None)
    assert bench.parse_arguments(commands["nanovllm"][2:]).quantization is None
    result = stand_in({"nanovllm": answer(2.0), "nanovllm int8": answer(1.0), "other": answer(4.0)})
    assert result["ratios"] == {"nanovllm": 2.0, "nanovllm int8": 1.0, "other": 4.0}


@pytest.mark.parametrize("named", ["m.gguf", ""])
def test_every_engine_gets_the_gguf_file_itself(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its folder was named."""
    from helpers.gguf_models import save_gguf

    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "m.gguf"
    save_gguf(path, "qwen3", "Q8_0")
    shutil.rmtree(path.with_name("m-transformers"))
    args = bench.parse_arguments(["--model", str(path.parent / named), "--compare", "transformers"])
    args.compare = ["llama-cpp", "openvino", "transformers"]
    told: list[str] = []

    def run_engine(command: list[str], *_: object) -> dict[str, Any]:
        if "-m" in command:
            told.append(json.loads(Path(command[3]).read_text())["model"])
        else:
            told.append(bench.parse_arguments(command[2:]).model)
        found: dict[str, Any] = {"seconds": 1.0, "num_output_tokens": 7, "load_seconds": 1.0, "warm_up_seconds": 0.5}
        return found | {"versions": {}}

    monkeypatch.setattr(bench_compare, "run_engine", run_engine)
    args.repeat = 1
    compare(args, None, WORKLOAD, torch.float32, MACHINE)
    lines = [line for name in args.compare for line in RIVALS[name].modes]
    assert told == [str(path)] * (1 + len(lines))


def specify(path: Path) -> dict[str, Any]:
    path.write_bytes(b"GGUF")
    return {"model": str(path), "exports": "none", "dtype": "bfloat16", "threads": 1, "max_num_seqs": 1}


@pytest.mark.parametrize("mode", ["q8_0", "q4_0", "q4_k_m"])
def test_llama_cpp_quantises_no_file(exporter: Any, mode: str, tmp_path: Path) -> None:
    with pytest.raises(worker.CannotRun, match=f"m.gguf has the types that it has: .* {mode.upper()}"):
        exporter.load(specify(tmp_path / "m.gguf"), mode)


@pytest.mark.parametrize("words", ["unknown model architecture: 'new'", ""])
def test_llama_cpp_says_why_it_does_not_load_a_file(exporter: Any, words: str, tmp_path: Path) -> None:
    def load(path: bytes, _: object) -> None:
        assert path == str(tmp_path / "m.gguf").encode()
        if words:
            exporter.print_errors(exporter.ERROR, f"{words}\n".encode(), None)
            exporter.print_errors(exporter.ERROR, b"failed to load model\n", None)

    exporter.llama_cpp.llama_model_load_from_file = load
    exporter.llama_cpp.llama_model_default_params = lambda: None
    with pytest.raises(worker.CannotRun, match=f"does not load .*m.gguf: {words or 'it gives no reason'}$"):
        exporter.load(specify(tmp_path / "m.gguf"), "")


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [("", "OpenVINO does not read m.gguf: no such type: Q5_K$"), ("int4", "m.gguf has the types that it has")],
)
def test_openvino_says_why_it_does_not_load_a_file(
    mode: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such type:\n  Q5_K\n")

    genai = SimpleNamespace(SchedulerConfig=SimpleNamespace, ContinuousBatchingPipeline=refuse, GenerationConfig=None)
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.openvino", raising=False)
    rival = importlib.import_module("benchmarks.rivals.openvino")
    sys.modules.pop("benchmarks.rivals.openvino")
    with pytest.raises(worker.CannotRun, match=sentence):
        rival.load(specify(tmp_path / "m.gguf") | {"max_num_batched_tokens": None}, mode)


def test_a_worker_that_takes_turns_prints_the_seconds_of_each_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[dict[str, Any]] = []
    lines = [{"prompts": [[n]], "output_lens": [n]} for n in (1, 2)]
    (tmp_path / "spec.json").write_text('{"takes_turns": true}')
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "spec.json")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    worker.main(lambda *_: worker.Engine(lambda work: ran.append(work) or 1, "fast"), {"v": "1"})
    first, *seconds = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {"note": "fast", "versions": {"v": "1"}}
    assert len(seconds) == 2 and all(float(one) >= 0 for one in seconds)
    assert ran == lines


def test_a_worker_that_scores_prints_the_log_probabilities_of_the_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({"scores": True, "workload": vars(WORKLOAD)}))
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "spec.json")])
    engine = worker.Engine(lambda _: 0, "", score=lambda prompt: [-0.5 * token for token in prompt[1:]])
    worker.main(lambda *_: engine, {})
    assert json.loads(capsys.readouterr().out)["logprobs"] == [[-1.0, -1.5], []]


def test_a_worker_prints_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"workload": vars(WORKLOAD), "warm_up": vars(WORKLOAD.warm_up(50)), "dtype": "x"}))
    ran = []

    def load(spec: dict[str, Any], mode: str) -> worker.Engine:
        if mode == "cannot":
            raise worker.CannotRun(f"it has no {spec['dtype']}")
        return worker.Engine(lambda work: ran.append(work) or sum(work["output_lens"]), f"mode {mode}")

    for mode, wanted in (
        ("q8_0", {"num_output_tokens": 7, "note": "mode q8_0", "versions": {"v": "1"}}),
        ("cannot", {}),
    ):
        monkeypatch.setattr(sys, "argv", ["worker", str(spec), mode])
        worker.main(load, {"v": "1"})
        document = json.loads(capsys.readouterr().out)
        if wanted:
            assert wanted.items() <= document.items() and document["seconds"] >= 0 <= document["load_seconds"]
        else:
            assert document == {"cannot_run": "it has no x"}
    assert ran == [vars(WORKLOAD.warm_up(50)), vars(WORKLOAD)]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker of llama.cpp, without its packages."""
    names = SimpleNamespace(QWEN2=2, QWEN3=3, QWEN35=35, QWEN35MOE=36)
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(MODEL_ARCH=names, GGUFWriter=None))
    library = SimpleNamespace(llama_log_callback=lambda function: function)
    library.llama_backend_init = lambda: None
    library.llama_log_set = lambda *_: None
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.llama_cpp", raising=False)
    yield importlib.import_module("benchmarks.rivals.llama_cpp")
    sys.modules.pop("benchmarks.rivals.llama_cpp")


def test_llama_cpp_finds_the_key_head_of_each_value_head(exporter: Any) -> None:
    """It pairs value head i with key head i modulo their number. Every tensor has the value heads in the same order."""
    config = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4}
    config |= {"linear_value_head_dim": 3}
    heads = np.arange(6, dtype=np.float32)
    values = np.repeat(heads, 3)[:, None]  # [value heads * value dim, 1], each the number of its head
    keys = np.full((16, 1), -1, np.float32)

    def convert(name: str, tensor: np.ndarray) -> np.ndarray:
        found: np.ndarray = exporter.convert_hybrid(f"model.layers.0.linear_attn.{name}", tensor, config)[1]
        return found

    order = convert("in_proj_b.weight", heads[:, None])[:, 0]
    assert [head // 3 for head in order.tolist()] == [0, 1, 0, 1, 0, 1]
    assert sorted(order) == heads.tolist()
    rows = np.repeat(order, 3)
    assert np.array_equal(convert("in_proj_z.weight", values)[:, 0], rows)
    assert np.array_equal(convert("out_proj.weight", values.T)[0], rows)
    for name, tensor in (("in_proj_qkv.weight", values), ("conv1d.weight", values[:, None])):
        found = convert(name, np.concatenate((keys.reshape(16, *tensor.shape[1:]), tensor)))
        assert found.shape == (16 + 18, 1) and (found[:16] == -1).all() and np.array_equal(found[16:, 0], rows)
    assert np.array_equal(convert("A_log", heads), -np.exp(order))
    assert np.array_equal(convert("norm.weight", heads), heads)
    assert np.array_equal(exporter.convert_hybrid("model.norm.weight", heads, config)[1], heads + 1)
    assert exporter.convert_hybrid("model.layers.0.linear_attn.dt_bias", heads, config)[0].endswith(".dt_proj.bias")


def test_llama_cpp_gets_one_tensor_for_all_experts_of_a_layer(exporter: Any) -> None:
    names = [f"model.layers.0.mlp.experts.{i}.{kind}_proj.weight" for kind in ("up", "down") for i in (2, 0, 1)]
    tensors = [(name, np.full((2, 3), i)) for i, name in enumerate(names)]
    found = dict(exporter.stack_experts(iter([*tensors, ("model.norm.weight", np.ones(3))]), 3))
    assert list(found) == [f"model.layers.0.mlp.experts.{kind}_proj.weight" for kind in ("up", "down")] + [
        "model.norm.weight"
    ]
    assert found["model.layers.0.mlp.experts.down_proj.weight"][:, 0, 0].tolist() == [4, 5, 3]


def test_layers_have_the_kinds_that_the_configuration_names(exporter: Any) -> None:
    assert exporter.list_kinds({"num_hidden_layers": 5}) == ["linear_attention"] * 3 + [
        "full_attention",
        "linear_attention",
    ]
    assert exporter.list_kinds({"num_hidden_layers": 1, "layer_types": ["full_attention"]}) == ["full_attention"]
