"""The commands of a first try: a conversation in the terminal, and the description of the machine."""

import io
import os
import platform
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT

from nanovllm import LLM, SamplingParams, __version__
from nanovllm.apps.cli import main
from nanovllm.apps.doctor import describe
from nanovllm.backends import NAMES

# ---- chat


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, typed: str) -> list[str]:
    """Return what `nanovllm chat` writes after its greeting, split at the prompts."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", "tiny-qwen3", "--temperature", "0", "--dtype", "float32", *arguments]) == 0
    greeting, *answers = capsys.readouterr().out.split("> ")
    assert "Ctrl-D ends the conversation" in greeting
    return [answer.rstrip("\n") for answer in answers]


CAPITAL = "What is the capital of Japan?"


def test_the_answers_are_those_of_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each turn sees those before it; /new forgets them; an empty line asks nothing; the end of the input ends it."""
    typed = f"{CAPITAL}\n\nAnd of France?\n/new\n{CAPITAL}\n"
    said = talk(monkeypatch, capsys, typed=typed)
    params = SamplingParams(temperature=0, max_tokens=None)
    with LLM("tiny-qwen3", dtype="float32") as llm:
        turn = [{"role": "user", "content": CAPITAL}]
        first = llm.chat(turn, params, use_tqdm=False)[0]["text"]
        turn += [{"role": "assistant", "content": first}, {"role": "user", "content": "And of France?"}]
        second = llm.chat(turn, params, use_tqdm=False)[0]["text"]
    assert "Tokyo" in first
    assert said == [first, "", second, "", first, ""]


def test_a_system_prompt_and_limits_are_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = talk(monkeypatch, capsys, "--system", "Be brief.", "--max-tokens", "3", typed=f"{CAPITAL}\n")
    with LLM("tiny-qwen3", dtype="float32") as llm:
        turn = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": CAPITAL}]
        expected = llm.chat(turn, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]["text"]
    assert said == [expected, ""]


def test_a_conversation_that_is_too_long_is_said_and_may_be_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = talk(monkeypatch, capsys, "--max-model-len", "64", typed=f"{'long ' * 100}\n/new\n{CAPITAL}\n")
    assert "raise max_model_len; /new starts another conversation" in said[0]
    assert "Tokyo" in said[2]


def test_wrong_values_are_refused_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "tiny-qwen"]) == 2
    assert main(["chat", "tiny-qwen3", "--temperature", "-1"]) == 2
    said = capsys.readouterr().err
    assert 'did you mean "tiny-qwen3"?' in said and "temperature is -1.0" in said


@pytest.mark.slow
def test_an_answer_is_written_while_it_is_computed_and_ctrl_c_ends_only_it() -> None:
    command = [
        sys.executable,
        "-m",
        "nanovllm",
        "chat",
        "tiny-qwen3",
        "--temperature",
        "9",
        "--max-model-len",
        "100000",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        for question, prompt in (("Count.\n", "> "), ("Now?\n", "(stopped)\n> ")):
            process.stdin.write(question)
            process.stdin.flush()
            seen = ""
            while not seen.partition(prompt)[2]:  # the first letter of the answer
                piece = process.stdout.read(1)
                assert piece, process.stderr
                seen += piece
            process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert rest.endswith("(stopped)\n> \n"), "the end of the second answer, and of the input"


def test_chat_is_short() -> None:
    assert len((ROOT / "nanovllm" / "apps" / "chat.py").read_text().splitlines()) <= 60


# ---- the page

PAGE = (ROOT / "docs" / "first-try.md").read_text()


def test_the_page_installs_the_versions_of_torch_that_the_package_takes() -> None:
    """Another version would be replaced by the default build when the package is installed."""
    (wanted,) = re.findall(r'"(torch[<>=].*?)"', (ROOT / "pyproject.toml").read_text())
    commands = re.findall(r"pip (?:install|download) ([^`\n]+)", PAGE)
    assert len(commands) >= 6 and all(command.startswith(f'"{wanted}"') for command in commands)
    assert "Behind a mirror" in PAGE and "--find-links" in PAGE and "HF_ENDPOINT" in PAGE


def test_the_page_s_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ""
    for command in ("chat", "doctor"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown += capsys.readouterr().out
    for option in ("--temperature", "--system", "--max-tokens"):
        assert option in shown and option in PAGE


# ---- doctor


def test_the_description_has_what_a_bug_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    facts = dict(re.findall(r"^  (\S+(?: \S+)*?)  +(.+)$", shown, re.MULTILINE))
    assert facts["nano-vllm"].startswith(f"{__version__}, ")
    assert facts["python"].startswith(platform.python_version())
    assert facts["torch"] == version("torch")  # of the package: torch.__version__ may name the build, too
    assert facts["processor"].endswith(platform.machine())
    assert re.match(r"\d+ that this process may use", facts["cores"])
    assert re.match(r"\d+ in torch", facts["threads"])
    assert facts["compiler"]
    assert re.match(r"\d+\.\d\d GiB", facts["free"])
    assert facts["HF_ENDPOINT"] == "http://mirror.example"
    assert facts["device"] and facts["dtype"]
    assert [name for name in facts if name.endswith(" backend")] == [f"{name} backend" for name in NAMES]
    assert sum(facts[f"{name} backend"].startswith("chosen: ") for name in NAMES) == 1


def test_the_backend_that_is_chosen_is_the_one_that_runs() -> None:
    shown = describe("tiny-qwen3")
    with LLM("tiny-qwen3") as llm:
        backend = llm.engine.config.attention_backend
        dtype = llm.engine.config.dtype
    assert re.search(rf"^  {backend} backend +chosen: ", shown, re.MULTILINE)
    assert re.search(rf"^  dtype +{dtype} ", shown, re.MULTILINE)


def test_a_reason_is_given_for_each_backend_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.backends.cpu.library import cpu_library

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.cache_clear()
    try:
        shown = describe("qwen3-0.6b")
    finally:
        cpu_library.cache_clear()
    assert re.search(r"compiler +no-such-compiler does not run", shown)
    assert re.search(r"flash_attn backend +cannot run: it needs a CUDA device", shown)
    assert re.search(r"cpu backend +cannot run: its kernels cannot be compiled", shown)
    assert re.search(r"torch backend +chosen: the first that can run, of cpu, torch", shown)


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny-qwen"]) == 2
    assert 'did you mean "tiny-qwen3"?' in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "doctor"])
def test_both_have_help_without_torch(command: str) -> None:
    code = (
        "import sys; from nanovllm.apps.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.endswith("[]\n") and f"nanovllm {command}" in shown.stdout


@pytest.mark.parametrize(("option", "value"), [("--max-tokens", "-1"), ("--temperature", "-1")])
def test_chat_refuses_a_wrong_value_before_it_looks_for_the_model(
    option: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["chat", "no/such-model", option, value]) != 0
    assert option.strip("-").replace("-", "_") in caplog.text and "such-model" not in caplog.text
