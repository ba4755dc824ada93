"""Scripts for nano-vLLM and vLLM: docs/porting.md is run cell by cell, and the examples as they are."""

import ast
import pickle
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.tiny import make_tokenizer

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.config import EngineConfig
from nanovllm.models.diagnosis import METHODS
from nanovllm.sampling_params import GuidedDecodingParams
from nanovllm.vllm_names import ADVICE, OPTIONS, SAMPLING, translate_names

PAGE = (ROOT / "docs" / "porting.md").read_text()
MARK = "†"
A, B = map(make_tokenizer().token_to_id, "ab")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


ROWS = table("Side by side")


@pytest.fixture(scope="module")
def llm(reciter: Path) -> Iterator[LLM]:
    with LLM(reciter, max_model_len=64) as llm:
        yield llm


@pytest.fixture
def names(reciter: Path) -> Iterator[dict[str, Any]]:
    """The names that the table's code may use."""
    with LLM(reciter, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        prompts = ["a", "A"]
        yield {
            "LLM": LLM,
            "SamplingParams": SamplingParams,
            "StructuredOutputsParams": StructuredOutputsParams,
            "GuidedDecodingParams": GuidedDecodingParams,
            "TokensPrompt": nanovllm.TokensPrompt,
            "model": str(reciter),
            "llm": llm,
            "params": params,
            "prompts": prompts,
            "outputs": llm.generate(prompts, params, use_tqdm=False),
            "scored": llm.generate(prompts, SamplingParams(0, 1, logprobs=1), use_tqdm=False),
            "chat": [{"role": "user", "content": "a"}],
        }


def codes(cell: str) -> list[str]:
    """The code in a cell, with the letters a and b's ids as this model has them."""
    found = re.findall(r"`([^`]+)`", cell)
    return [c.replace("97, 98", f"{A}, {B}").replace("[98]", f"[{B}]") for c in found if "sampling_params=" not in c]


def run(code: str, names: dict[str, Any]) -> Any:
    """The value of an expression, an engine by its options; None of a statement."""
    code = code.replace("from vllm", "from nanovllm")
    try:
        compiled = compile(code, "docs/porting.md", "eval")
    except SyntaxError:
        exec(code, names)
        return None
    value = eval(compiled, names)
    if isinstance(value, LLM):
        value.close()
        return LLM
    return value


@pytest.mark.parametrize("row", ROWS, ids=[row[0] or row[1] for row in ROWS])
def test_every_cell_of_the_table_runs_or_is_refused_and_a_row_gives_the_same(
    row: list[str], names: dict[str, Any]
) -> None:
    if "tructured" in "".join(row):
        pytest.importorskip("llguidance")
    values = []
    for cell in row[1:]:
        for code in codes(cell):
            if MARK in cell:
                with pytest.raises((TypeError, ValueError, AttributeError)):
                    run(code, names)
            else:
                values.append(run(code, dict(names)))
    assert values
    if row[0] != "step by step":
        texts = [[getattr(o, "text", o) for o in v] if isinstance(v, list) else v for v in values]
        assert all(text == texts[0] for text in texts)


def test_the_page_lists_every_name_of_vllms_that_is_taken() -> None:
    section = PAGE.split("## vLLM's options")[1]
    of_llm, of_sampling = section.split("Of `SamplingParams(...)`")
    of_sampling = of_sampling.split("`guided_decoding` stands for")[0]
    listed = [set(re.findall(r"`([a-z_0-9]+)`", text)) for text in (of_llm, of_sampling)]
    assert OPTIONS.keys() - {"hf_config", "eos"} <= listed[0], "without nano-vLLM's"
    assert listed[1] == SAMPLING.keys(), "nothing that is not so"
    for row in of_llm.splitlines():
        if row.startswith("| 1 |"):
            for name in re.findall(r"`([a-z_]+)`", row):
                assert translate_names({name: 1}, "LLM") == {}


@pytest.mark.parametrize("name", METHODS)
def test_a_missing_method_says_what_to_do_instead(name: str, llm: LLM) -> None:
    if hasattr(LLM, name):
        return
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError) as error:
        getattr(llm, name)
    assert str(error.value) == f"LLM has no attribute {name!r}: {METHODS[name]}" and len(METHODS[name]) > 20


def test_a_name_that_vllm_has_not_gets_no_advice(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'generat'$"):
        llm.generat  # type: ignore[attr-defined] # noqa: B018


REFUSED = {
    "LLM": {
        "enable_lora": True,
        "hf_overrides": {"a": 1},
        "task": "embed",
    },
    "SamplingParams": {"best_of": 2, "logits_processors": [print], "truncate_prompt_tokens": 4, "extra_args": {"a": 1}},
    "StructuredOutputsParams": {"structural_tag": "{}", "disable_any_whitespace": True, "whitespace_pattern": " "},
}


def test_what_would_be_lost_is_not_left_out_but_done_otherwise() -> None:
    for what, fields in REFUSED.items():
        for name, value in fields.items():
            with pytest.raises(ValueError, match=f"^{what}: {name}, which vLLM has, is not supported here") as error:
                translate_names({name: value}, what)
            assert str(error.value).endswith(ADVICE[name]) and "leave" not in str(error.value)


def test_options_and_fields_with_another_name_here_are_understood() -> None:
    given = {"block_size": 32, "num_gpu_blocks_override": 40, "kv_cache_memory_bytes": None}
    expected = EngineConfig("model", kvcache_block_size=32, num_kvcache_blocks=40)
    assert EngineConfig.from_options("model", given) == expected
    assert EngineConfig.from_options("model", {"block_size": None}) == EngineConfig("model")
    with pytest.raises(ValueError, match="block_size and kvcache_block_size are the same: give one"):
        EngineConfig.from_options("model", {"block_size": 16, "kvcache_block_size": 32})
    old: Any = {"guided_decoding": GuidedDecodingParams(regex="[0-9]+", backend="outlines")}  # type: ignore[call-arg]
    assert SamplingParams(**old) == SamplingParams(structured_outputs={"regex": "[0-9]+"})
    assert SamplingParams(**{"guided_decoding": None}) == SamplingParams()
    with pytest.raises(ValueError, match="guided_decoding and structured_outputs are the same"):
        SamplingParams(**old, structured_outputs={"regex": "a"})


def test_requests_are_numbered(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False)
    numbers = [output.request_id for output in outputs]
    assert all(isinstance(number, str) for number in numbers) and len({*numbers}) == 2
    for output in outputs:
        assert isinstance(output, nanovllm.RequestOutput) and isinstance(output.outputs[0], nanovllm.CompletionOutput)
        assert pickle.loads(pickle.dumps(output)).request_id == output.request_id


def test_a_name_of_vllms_is_not_one_of_ours_too() -> None:
    from dataclasses import fields

    from nanovllm.config import EngineConfig

    assert not OPTIONS.keys() & {field.name for field in fields(EngineConfig)}
    assert not SAMPLING.keys() & {field.name for field in fields(SamplingParams)}


# ---- what pages show


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readmes_example_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("README.md", "python")
    (shown,) = blocks("README.md", "text")
    exec(code, {})
    assert capsys.readouterr().out == shown


# ---- the examples

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in ("extract", "rerank"))
"""Those in the style of vLLM's."""
SHOWN = {
    "basic": ["prompt of 17 tokens", "'The capital of France is Paris.'", "17 + 25 = 42", "stop"],
    "batch": ["40 answers", "'2 + 5 = 7' (stop, log-probability -0."],
    "chat": ["The capital of Japan is Tokyo.", "7, 8, 9, 10, 11", "Paris"],
    "prefix_caching": ["first: 0 of 269 tokens", "then: 256 of 269 tokens", "cached beginning: True"],
    "seeds": ["seed 1 twice, the same text: True"],
}

VLLM = {
    "LLM": "model seed max_model_len max_num_seqs gpu_memory_utilization enable_prefix_caching disable_log_stats",
    "SamplingParams": "n temperature top_p max_tokens seed stop logprobs",
    "chat": "messages sampling_params use_tqdm add_generation_prompt chat_template_kwargs",
    "generate": "prompts sampling_params use_tqdm",
    "apply_chat_template": "tokenize add_generation_prompt enable_thinking",
}
"""Of vLLM's callables, the arguments that the examples use."""
ATTRIBUTES = (
    "generate chat get_tokenizer get_default_sampling_params apply_chat_template temperature max_tokens prompt "
    "prompt_token_ids num_cached_tokens outputs text token_ids finish_reason cumulative_logprob perf_counter append"
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_it_should(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    for part in SHOWN[path.stem]:
        assert part in shown


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_only_what_vllm_has_too(path: Path) -> None:
    tree = ast.parse(path.read_text())
    ours = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("nanovllm")]
    assert [ast.unparse(node) for node in ours] in (
        ["from nanovllm import LLM, SamplingParams"],
        ["from nanovllm import LLM"],
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr in ATTRIBUTES.split(), node.attr
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in VLLM:
                assert {keyword.arg for keyword in node.keywords} <= set(VLLM[name].split())


def test_there_are_five_examples() -> None:
    assert {path.stem for path in EXAMPLES} == SHOWN.keys()
