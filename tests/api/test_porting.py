"""Scripts for nano-vLLM and vLLM: docs/porting.md is run cell by cell, and the examples as they are."""

import ast
import dataclasses
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
from nanovllm.sampling_params import KINDS, GuidedDecodingParams
from nanovllm.utils import vllm_names
from nanovllm.utils.foreign_names import translate_names
from nanovllm.utils.vllm_names import ACCEPTED, ADVICE, GUIDED
from scripts.check_code import find_imports, find_modules

OPTIONS = ACCEPTED["LLM"]
SAMPLING = ACCEPTED["SamplingParams"]
PAGE = (ROOT / "docs" / "porting.md").read_text()
MARK = "†"
STANDIN = "‡"
A, B = map(make_tokenizer().token_to_id, "ab")


def list_rows() -> list[list[str]]:
    """The cells of the two tables that are side by side, without their heads."""
    section = PAGE.split("## Side by side\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows]
    return [row for row in rows if "here" not in row and "---" not in row]


ROWS = list_rows()


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
    row: list[str], names: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Cells with a mark are run by the stand-in, and by it alone."""
    if "tructured" in "".join(row):
        pytest.importorskip("llguidance")
    values = []
    for cell in row:
        for code in (code.replace("from vllm", "from nanovllm") for code in codes(cell)):
            if STANDIN in cell:
                with pytest.raises((TypeError, ImportError)):
                    run(code, dict(names) | {"PoolingParams": dict})
                vllm = request.getfixturevalue("vllm")
                with vllm.LLM(names["model"], max_model_len=64) as llm:
                    own = {"llm": llm, "PoolingParams": vllm.PoolingParams}
                    values.append(run(code.replace("from nanovllm", "from vllm"), names | own))
            elif MARK in cell:
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


def test_a_name_that_is_not_there_gets_the_nearest_one_or_the_command() -> None:
    with pytest.raises(AttributeError, match="'nanovllm' has no attribute 'LoraRequest': did you mean 'LoRARequest'"):
        nanovllm.LoraRequest  # type: ignore[attr-defined] # noqa: B018
    for name in ("EngineArgs", "LLMEngine", "PoolingParams", "AsyncLLM", "beam_search"):
        with pytest.raises(AttributeError, match=f"'nanovllm' has no attribute '{name}': .*`nanovllm run script.py`"):
            getattr(nanovllm, name)
        assert not hasattr(nanovllm, name)
        with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
            exec(f"from nanovllm import {name}")


@pytest.mark.parametrize("module", ["nanovllm", "nanovllm.config", "nanovllm.inputs", "nanovllm.sampling_params"])
def test_modules_and_names_that_nobody_has_are_what_python_says(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'nanovllm.*nothing'"):
        exec(f"import {module}.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {module} import nothing")


REFUSED = {
    "LLM": {
        "hf_overrides": {"a": 1},
        "task": "classify",
    },
    "SamplingParams": {"best_of": 2, "logits_processors": [print], "truncate_prompt_tokens": 4, "extra_args": {"a": 1}},
    "StructuredOutputsParams": {"structural_tag": "{}", "disable_any_whitespace": True, "whitespace_pattern": " "},
}


def test_what_would_be_lost_is_not_left_out_but_done_otherwise() -> None:
    for what, fields in REFUSED.items():
        for name, value in fields.items():
            with pytest.raises(ValueError, match=f"^{what}: {name}, which others have, is not supported here") as error:
                translate_names({name: value}, what)
            assert str(error.value).endswith(ADVICE[name]) and "leave" not in str(error.value)
            assert translate_names({name: None}, what) == {}, "None asks for the default"


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


def test_the_table_of_names_is_data_and_answers_each_name_once() -> None:
    """It imports nothing of the package, so that options and parameters may look in it."""
    path = ROOT / "nanovllm" / "utils" / "vllm_names.py"
    assert [*find_imports(path, find_modules(ROOT / "nanovllm"))] == []
    assert GUIDED == KINDS
    owners = (OPTIONS, SAMPLING, ACCEPTED["StructuredOutputsParams"])
    given = [name for rows in vllm_names.TABLES.values() for row in rows for name in row.names.split()]
    assert len(given) == sum(map(len, owners)), "no name twice in a table"
    advised = [name for rows in vllm_names.TABLES.values() for row in rows if row.advice for name in row.names.split()]
    assert len(advised) == len(ADVICE), "one advice for a name"


def test_none_is_the_default_of_every_option() -> None:
    ours: dict[str, None] = dict.fromkeys(
        field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"
    )
    others = ("download_dir", "tokenizer_revision", "hf_token", "code_revision", "rope_theta", "hf_config_path")
    given = {**ours, **dict.fromkeys(OPTIONS), **dict.fromkeys(others)}
    assert EngineConfig.from_options("model", given) == EngineConfig("model")
    with pytest.raises(TypeError, match="no option 'max_modl_len'; did you mean 'max_model_len'"):
        EngineConfig.from_options("model", {"max_modl_len": 64})
    with pytest.raises(TypeError, match="no option 'max_token'; did you mean 'max_tokens'"):  # its None means no limit
        SamplingParams(max_token=None)  # type: ignore[call-arg]


def test_parameters_are_rebuilt_from_their_fields_as_outlines_does(llm: LLM) -> None:
    params = SamplingParams(temperature=0.5, stop="x", bad_words=["cd"], seed=3, max_tokens=None)
    fields = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    assert SamplingParams(**fields) == params
    assert fields.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


def test_none_of_from_optional_is_the_default_of_all_but_max_tokens() -> None:
    given = dict.fromkeys(SamplingParams.__struct_fields__)
    assert SamplingParams.from_optional(**given) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional(n=3, top_p=None, output_kind=None) == SamplingParams(n=3)
    with pytest.raises(TypeError, match="no option 'top_kk'; did you mean 'top_k'"):
        SamplingParams.from_optional(top_kk=None)


def test_token_ids_are_prompts_under_their_older_name_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    expected = llm.generate([[5, 6], [7]], params, use_tqdm=False)
    assert llm.generate(prompt_token_ids=[[5, 6], [7]], sampling_params=params, use_tqdm=False) == expected
    assert llm.generate(None, params, False, prompt_token_ids=[7]) == expected[1:]
    with pytest.raises(ValueError, match="generate has prompts and prompt_token_ids: give one of them"):
        llm.generate("a", params, prompt_token_ids=[[7]])
    with pytest.raises(ValueError, match="prompts is None; it must be"):
        llm.generate()


def test_options_that_change_nothing_are_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    given = {"max_seq_len_to_capture": 8192, "disable_log_requests": True, "swap_space": 4, "runner": "pooling"}
    with caplog.at_level("INFO", "nanovllm"):
        for _ in range(3):
            assert EngineConfig.from_options("model", given) == EngineConfig("model")
    (line,) = caplog.messages
    assert line == f"LLM: ignored, because nothing changes with it here: {', '.join(given)}"


def test_other_names_for_sampling_are_translated() -> None:
    def make(**given: Any) -> SamplingParams:
        return SamplingParams(**given)

    assert make(do_sample=False, max_new_tokens=3) == SamplingParams(temperature=0, max_tokens=3)
    assert make(do_sample=True, use_beam_search=False) == SamplingParams()
    assert make(guided_json={"type": "object"}) == SamplingParams(structured_outputs={"json": {"type": "object"}})
    assert make(guided_choice=["a", "b"], guided_regex=None) == SamplingParams(
        structured_outputs={"choice": ["a", "b"]}
    )
    with pytest.raises(ValueError, match="use_beam_search, which others have, is not supported here as True: n=8 and"):
        make(use_beam_search=True)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0), ("max_tokens", 5), ("max_new_tokens", 5), ("stop", "a")]
)
def test_what_belongs_to_a_request_says_so(name: str, value: Any) -> None:
    ours = name.replace("_new", "")
    advice = f"LLM has no {ours}, because it belongs to a request: generate(prompts, SamplingParams({ours}={value!r}))"
    with pytest.raises(TypeError, match=re.escape(advice)):
        EngineConfig.from_options("model", {name: value})


# ---- what would be silently wrong


def make_table(library: str, name: str, values: list[Any]) -> tuple[Any, Any]:
    """Return a table with the column `name` and another one, and that column."""
    columns = {"id": list(range(len(values))), name: values}
    module = pytest.importorskip(library)
    made = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}
    table = module.Dataset.from_dict(columns) if library == "datasets" else getattr(module, made[library])(columns)
    return table, table[name]


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "datasets"])
def test_a_table_gives_its_column_of_prompts(library: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    prompts = ["a", "bc", "a"]
    expected = llm.generate(prompts, params, use_tqdm=False)
    for given in make_table(library, "prompt", prompts):
        outputs = llm.generate(given, params, use_tqdm=False)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert len(dict(llm.stream(given, params))) == 3
        assert len(llm.embed(given, use_tqdm=False)) == 3
    talks = [[{"role": "user", "content": text}] for text in prompts]
    for given in make_table(library, "messages", talks):
        answers = llm.chat(given, params, use_tqdm=False)
        assert [o.prompt for o in answers] == [o.prompt for o in llm.chat(talks, params, use_tqdm=False)]
    table, _ = make_table(library, "text", prompts)
    for method, column in ((llm.generate, "prompt"), (llm.chat, "messages")):
        with pytest.raises(ValueError, match=rf"the table has the columns \['id', 'text'\]; .*'{column}'"):
            method(table)


def test_one_query_is_scored_with_every_document(llm: LLM) -> None:
    pairs = llm.score(["a", "a"], ["b", "c"], use_tqdm=False)
    assert llm.score("a", ["b", "c"], use_tqdm=False) == llm.score(["a"], ["b", "c"], use_tqdm=False) == pairs
    with pytest.raises(ValueError, match="3 continuations for 2 prompts"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_a_likelihood_does_not_pass_for_vllms_score(llm: LLM) -> None:
    (score,) = llm.score("a", "b", use_tqdm=False)
    with pytest.raises(AttributeError, match=r"vLLM's score is how relevant .* score\['logprob'\]"):
        score.outputs  # noqa: B018


def test_a_chat_refuses_unknown_roles(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"the role of message 1 is 'asistant'; .* did you mean 'assistant'"):
        llm.chat([{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}])


def test_images_are_refused_in_words(llm: LLM) -> None:
    with pytest.raises(ValueError, match="there are no images"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": None, "n": 1}})


def test_a_step_of_ones_own_is_refused() -> None:
    with pytest.raises(TypeError, match=r"generate does not call step\(\).*observe"):

        class Own(LLM):
            def step(self) -> Any:
                return super().step()


# ---- what pages show


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readmes_example_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("README.md", "python")
    (shown,) = blocks("README.md", "text")
    exec(code, {})
    assert capsys.readouterr().out == shown


# ---- the examples

OWN_STYLE = ("best_of_n", "distil", "extract", "rerank")
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in OWN_STYLE)
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
