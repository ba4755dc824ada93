"""lm-evaluation-harness gets from NanoVLLM what it gets from its own `hf` backend. Nothing is downloaded."""

import json
import random
import signal
import subprocess
import sys
from functools import partial, partialmethod
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from helpers.paths import BOX_MODEL, ROOT

from nanovllm import LLM
from nanovllm.apps.cli import main

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

    from nanovllm.lm_eval import NanoVLLM

# The harness takes two seconds to import, and so is imported by the tests that run, not by each process that collects.
pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")

TOLERANCE = 1e-3

CHOICE = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: SUMS.jsonl, train: SHOTS.jsonl}}
test_split: test
fewshot_split: train
num_fewshot: 5
fewshot_config: {sampler: first_n}
output_type: multiple_choice
doc_to_text: "What is {{a}} plus {{b}}?"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""
ROLLING = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
GENERATE = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: SUMS.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{a}} plus {{b}}?"
doc_to_target: "{{a}} + {{b}} = {{a + b}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: LIMIT}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)

    def sums(count: int) -> list[dict[str, Any]]:
        rows = []
        for _ in range(count):
            a = rng.randrange(50)
            b = rng.randrange(50)
            answer = rng.randrange(4)
            choices = [str(a + b + i - answer) for i in range(4)]
            rows.append({"a": a, "b": b, "choices": choices, "answer": answer})
        return rows

    words = ["Once", "there", "was", "a", "small", "cat", "that", "liked", "the", "sun", "and", "the", "green", "hill."]
    texts = [{"text": " ".join(rng.choice(words) for _ in range(n))} for n in (1, 5, 60, 150)]
    for name, rows in (("SUMS", sums(12)), ("SHOTS", sums(8)), ("TEXTS", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("sums", CHOICE), ("texts", ROLLING), ("answers", GENERATE.replace("LIMIT", "24"))):
        for data in ("SUMS", "SHOTS", "TEXTS"):
            text = text.replace(f"{data}.jsonl", str(folder / f"{data}.jsonl"))
        (folder / f"{name}.yaml").write_text(text)
    cut = (folder / "answers.yaml").read_text().replace("task: answers", "task: cut").replace('"STOP"', '"=", "7"')
    (folder / "cut.yaml").write_text(cut)
    return folder


@pytest.fixture(scope="module")
def hf() -> "HFLM":
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(BOX_MODEL), dtype="float32", device="cpu", max_length=192, batch_size=4)


@pytest.fixture(scope="module")
def ours() -> "NanoVLLM":
    from nanovllm.lm_eval import NanoVLLM

    return NanoVLLM(str(BOX_MODEL), dtype="float32", max_model_len=192, kvcache_block_size=16, max_gen_toks=64)


def evaluate(model: Any, folder: Path, names: list[str], **options: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"bootstrap_iters": 0, **options}
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, **options)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat template"])
def test_every_number_is_that_of_the_hf_backend(chat: bool, hf: "HFLM", ours: "NanoVLLM", tasks: Path) -> None:
    names = ["sums", "answers", "cut"] if chat else ["sums", "texts", "answers", "cut"]
    expected, found = (
        evaluate(model, tasks, names, apply_chat_template=chat, fewshot_as_multiturn=chat) for model in (hf, ours)
    )
    for name in names:
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=TOLERANCE), (name, metric)
        for one, other in zip(expected["samples"][name], found["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            for a, b in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
                if name == "sums":
                    assert b[0] == pytest.approx(a[0], abs=TOLERANCE) and a[1] == b[1]
                elif name == "texts":
                    assert b == pytest.approx(a, abs=TOLERANCE)
                else:
                    assert a == b
    if chat:
        assert found["results"]["answers"]["exact_match,none"] > 0.9, "the built-in model can add"


def instance(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_an_empty_context_spaces_and_long_contexts_are_as_the_hf_backend_takes_them(
    hf: "HFLM", ours: "NanoVLLM"
) -> None:
    long = "one two three four five six seven " * 40
    pairs = [("", "What is 2"), ("What ", "is 2 plus 2?"), ("What", " is"), (long, "eight"), (long, long[:300])]
    requests = [instance(*pair) for pair in pairs]
    expected, found = (model.loglikelihood(requests, disable_tqdm=True) for model in (hf, ours))
    for (logprob, is_greedy), (other, other_greedy) in zip(expected, found, strict=True):
        assert other == pytest.approx(logprob, abs=TOLERANCE) and is_greedy == other_greedy


def test_each_request_of_a_task_keeps_its_own_limits_and_stops(ours: "NanoVLLM") -> None:
    prompt = ours.apply_chat_template([{"role": "user", "content": "Count from 1 to 9."}])
    given = [{"max_gen_toks": 3}, {"until": "5"}, {"until": ["4", "7"], "max_tokens": 40}, {"until": ["<|im_end|>"]}]
    short, to_five, to_four, whole = ours.generate_until([instance(prompt, k) for k in given], disable_tqdm=True)
    assert whole.startswith(to_five) and to_five.startswith(to_four) and len(short) < len(whole)
    assert "4" in to_five and "5" not in to_five and "4" not in to_four and "9" in whole
    with pytest.raises(ValueError, match=r"192 .* raise max_model_len"):
        ours.generate_until([instance(prompt, {"max_gen_toks": 192})], disable_tqdm=True)


def test_requests_with_the_same_context_are_computed_together(ours: "NanoVLLM") -> None:
    contexts = [" ".join(f"{letter}{i}" for i in range(60)) for letter in "abcdef"]
    requests = [instance(context, f" {i}") for i in range(4) for context in contexts]
    before = ours.llm.stats()
    ours.loglikelihood(requests, disable_tqdm=True)
    after = ours.llm.stats()
    computed, prompts = (
        sum(sign * stats[name] for sign, stats in ((1, after), (-1, before)))
        for name in ("num_prompt_tokens", "num_cached_tokens")
    )
    lengths = [len(ours.tok_encode(context)) for context in contexts]
    assert prompts >= sum(3 * ((n - 2) // 16 * 16) for n in lengths)
    assert computed - prompts <= sum(n + 4 * 20 for n in lengths)


@pytest.mark.slow
def test_the_harness_knows_it_by_its_name_and_an_llm_can_be_given(tasks: Path, ours: "NanoVLLM") -> None:
    from nanovllm.lm_eval import NanoVLLM

    arguments = f"pretrained={BOX_MODEL},dtype=float32,max_model_len=192,kvcache_block_size=16"
    by_name = evaluate("nanovllm", tasks, ["sums"], model_args=arguments, limit=3)
    given = evaluate(NanoVLLM(ours.llm), tasks, ["sums"], limit=3)
    assert by_name["results"] == given["results"]
    assert isinstance(ours.llm, LLM) and ours.tokenizer_name == str(BOX_MODEL).replace("/", "__")


def test_the_six_lines_of_the_docs_run(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the built-in model and a task of ours in place of those that would be downloaded.

    The harness's own tasks, which are thousands of files, are not read.
    """
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(lm_eval.evaluator, "TaskManager", partial(TaskManager, include_defaults=False))
    code = (ROOT / "docs" / "evaluation.md").read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 6
    task = yaml.safe_load((tasks / "sums.yaml").read_text())
    for old, new in (
        ('"Qwen/Qwen3-0.6B", max_model_len=4096', f'"{BOX_MODEL}", max_model_len=192'),
        ('["hellaswag", "gsm8k"]', "[task], limit=2, bootstrap_iters=0"),
    ):
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {"task": task}
    exec(code, names)
    assert "acc,none" in names["results"]["results"]["sums"]


def test_the_command_is_the_harnesss_own_with_our_model(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported the harness. Its own tasks are not read."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.setattr(sys, "argv", [])  # the command sets it
    command = ["eval", "--model", str(BOX_MODEL), "dtype=float32", "max_model_len=192"]
    options = ["--include_path", str(tasks), "--tasks", "answers", "--limit", "2", "--output_path", str(tmp_path)]
    assert main([*command, *options, "--apply_chat_template"]) == 0
    printed = capsys.readouterr().out
    assert "exact_match" in printed and "nanovllm" in printed
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["answers"]["exact_match,none"] >= 0.5


WITHOUT_DEFAULTS = """
from functools import partialmethod
from lm_eval.tasks import TaskManager
from nanovllm.apps.cli import run
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
run()
"""


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_within_seconds_without_results(tasks: Path, tmp_path: Path) -> None:
    """3,000 questions, so that it is under way when the signal comes. The harness's own tasks are not read."""
    rows = [{"a": a, "b": b, "choices": [], "answer": 0} for a in range(50) for b in range(60)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = (tasks / "answers.yaml").read_text().replace(str(tasks / "SUMS.jsonl"), str(tmp_path / "many.jsonl"))
    (tmp_path / "many.yaml").write_text(task.replace("task: answers", "task: many"))
    command = [sys.executable, "-c", WITHOUT_DEFAULTS, "eval", "--model", str(BOX_MODEL)]
    command += ["dtype=float32", "max_model_len=192"]
    options = ["--include_path", str(tmp_path), "--tasks", "many", "--output_path", str(tmp_path / "results")]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        said = ""
        assert process.stderr is not None
        while "Generating" not in said:
            piece = process.stderr.read(1)
            assert piece, said
            said += piece
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in rest, rest
    assert not (tmp_path / "results").exists()


def test_an_interrupted_evaluation_leaves_a_model_that_evaluates(
    ours: "NanoVLLM", monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [instance(f"What is {i} plus {i}?", {"until": ["STOP"], "max_gen_toks": 20}) for i in range(4)]
    expected = ours.generate_until(requests, disable_tqdm=True)
    engine = ours.llm.engine
    step = engine.step
    num_steps = 0

    def step_and_interrupt() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", step_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours.generate_until(requests, disable_tqdm=True)
    monkeypatch.undo()
    assert not engine.has_work and engine.stats()["num_free_blocks"] == engine.stats()["num_blocks"]
    assert ours.generate_until(requests, disable_tqdm=True) == expected


def test_a_flag_that_no_command_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "qwen3-8b", "--gpu-memory", "80GB", "--tasks", "x"])
    assert "--tasks" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_for_a_real_model_prints_scores_and_tokens_side_by_side(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts.real_model import main as compare

    options = ["--include-path", str(tasks), "--tasks", "answers", "--limit", "3", "--dtype", "float32", "--chat"]
    compare([str(BOX_MODEL), *options, "--max-length", "192"])
    printed = capsys.readouterr().out
    for name in ("answers: exact_match,none", "tokens of the answers"):
        (line,) = [line for line in printed.splitlines() if line.startswith(name)]
        hf, ours = line.removeprefix(name).split()
        assert hf == ours
    assert "3 of 3 answers are the same text" in printed
