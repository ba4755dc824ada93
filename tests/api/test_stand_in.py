"""The stand-in: in a process that `nanovllm run` starts, and in its children, `vllm` is this engine."""

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from helpers.paths import BOX_MODEL, ROOT
from helpers.tiny import draw_prompts, save_random
from safetensors.torch import load_file

import nanovllm
from nanovllm import SamplingParams
from nanovllm.apps import cli
from nanovllm.apps.standin import engine
from nanovllm.apps.standin.environment import VARIABLE, VERSION
from nanovllm.apps.standin.llm import LLM as VllmLLM
from nanovllm.apps.standin.llm import NAMES, OWN_NAMES, UNCALLED
from nanovllm.apps.standin.names import ACCEPTED, ADVICE, MODULES
from nanovllm.apps.standin.params import PoolingParams
from nanovllm.config import EngineConfig
from scripts.check_code import python_lines
from scripts.run_examples import replace_models, run_example

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_seqs": 8}
LIST = (ROOT / "docs" / "porting.md").read_text().split("These imports are answered there:")[1].split("\n\n")[1]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that does not have the package."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, timeout=300)


SCRIPT = """
import importlib.metadata, importlib.util, subprocess, sys
assert __name__ == "__main__" and importlib.util.find_spec("vllm") is not None
own = [importlib.metadata.version("vllm"), "torch" in sys.modules]
import vllm
assert "peft" not in sys.modules, "it takes seconds"
own += [vllm.__version__, vllm.__nanovllm__]
child = "import sys, importlib.util as u, importlib.metadata as m; "
child += "print(m.version('vllm'), u.find_spec('vllm').name, *sys.argv[1:])"
print(own, sys.argv[1:], subprocess.check_output([sys.executable, "-c", child, "x"], text=True, cwd="/").split())
sys.exit(3)
"""


@pytest.mark.slow
def test_a_script_and_its_children_see_this_engine_and_the_version_that_is_claimed(tmp_path: Path) -> None:
    """The child looks for the module. That of a test below imports it, which takes seconds."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours = nanovllm.__version__
    claimed = "0.10.1"
    done = python("-m", "nanovllm", "run", "--claim", claimed, str(script), "--replace", "-m", "a b")
    assert (
        done.stdout.strip() == f"{[claimed, False, claimed, ours]} ['--replace', '-m', 'a b'] {[claimed, 'vllm', 'x']}"
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr == (f"vllm is nanovllm {ours} in this process and its children; it calls itself {claimed}\n")


@pytest.mark.slow
def test_the_first_line_of_a_script_does_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import nanovllm.as_vllm\n" + SCRIPT)
    done = python(str(script), "y", **{VARIABLE: "0.22.1"})
    assert done.returncode == 3 and "['0.22.1', False, '0.22.1'" in done.stdout, done.stderr
    assert done.stdout.endswith("['y'] ['0.22.1', 'vllm', 'x']\n")
    assert done.stderr.count("vllm is nanovllm") == 1


@pytest.mark.slow
def test_it_refuses_where_vllm_itself_is_installed_unless_it_shall_replace_it(tmp_path: Path) -> None:
    real = tmp_path / "vllm" / "__init__.py"
    real.parent.mkdir()
    real.write_text("__version__ = 'real'")
    places = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    script = tmp_path / "script.py"
    script.write_text("import vllm; print(hasattr(vllm, '__nanovllm__'), vllm.__version__)")
    refused = python("-m", "nanovllm", "run", str(script), **places)
    assert refused.returncode == 2 and f"vLLM is installed ({real}): use another" in refused.stderr
    assert "nanovllm run --replace" in python("-c", "import nanovllm.as_vllm", **places).stderr
    done = python("-m", "nanovllm", "run", "--replace", str(script), **places)
    assert done.stdout == f"True {VERSION}\n", done.stderr
    assert done.stderr.endswith(f"it calls itself {VERSION}\n")


@pytest.mark.parametrize(
    ("option", "expected"), [((), "real real False"), (("--replace",), f"{VERSION} {VERSION} True")]
)
@pytest.mark.slow
def test_a_child_in_whose_path_vllm_itself_lies_asks_too(
    option: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """By its modules, and by its version, whichever of them the child asks for first."""
    (tmp_path / "vllm-0.dist-info").mkdir()
    (tmp_path / "vllm-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: real\n")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = 'real'")
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    child = "import importlib.metadata as m; v = m.version('vllm'); import vllm; "
    child += "print(v, vllm.__version__, hasattr(vllm, '__nanovllm__'))"
    script.write_text(
        "import os, subprocess, sys\n"
        f"path = os.environ['PYTHONPATH'] + os.pathsep + {str(tmp_path)!r}\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], env=os.environ | {{'PYTHONPATH': path}}, check=True)\n"
    )
    done = python("-m", "nanovllm", "run", *option, str(script))
    assert done.stdout == f"{expected}\n", done.stderr
    told = f"vLLM is installed ({tmp_path}/vllm/__init__.py), and vllm is vLLM itself in this process"
    assert (told in done.stderr) == (not option)


def test_a_module_that_is_hidden_by_that_of_the_children_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.hidden = 5")
    done = python("-m", "nanovllm", "run", "-c", "x", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 2, "an option that is none of the command's"
    script = tmp_path / "script.py"
    script.write_text("from importlib.metadata import version; print(hidden, version('vllm'))")
    done = python("-m", "nanovllm", "run", str(script), PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.stdout == f"5 {VERSION}\n", done.stderr


@pytest.mark.parametrize("line", re.findall(r"`(from vllm[^`]+)`", " ".join(LIST.split())))
def test_the_imports_of_the_page_are_answered(line: str, vllm: ModuleType) -> None:
    names: dict[str, Any] = {}
    exec(line, names)
    for name in names.keys() - {"__builtins__"}:
        assert name in UNCALLED or names[name] in (NAMES.get(name), OWN_NAMES["vllm.utils"].get(name))


def test_vllms_names_stay_in_the_stand_in() -> None:
    """The package itself has a table of options and fields alone, and functions that read it."""
    package = ROOT / "nanovllm"
    outside = [path for path in package.rglob("*.py") if path.relative_to(package).parts[:2] != ("apps", "standin")]
    readers = {path.stem for path in outside if "vllm_names import" in path.read_text()}
    assert readers == {"config", "foreign_names"}
    assert sum(python_lines((package / "utils" / f"{name}.py").read_text()) for name in readers - {"config"}) <= 40
    sources = [path.read_text() for path in (package / "apps" / "standin").rglob("*.py")]
    sources += [inspect.getsource(function) for function in (cli._add_run, cli._run)]
    assert sum(map(python_lines, sources)) <= 630


def test_modules_names_and_versions_are_answered_or_say_what_to_do(vllm: Any) -> None:
    assert importlib.metadata.version("vllm") == vllm.__version__ == VERSION
    assert importlib.metadata.metadata("vllm")["Name"] == "vllm"
    assert "vllm" not in importlib.metadata.packages_distributions()
    for module in MODULES.split():
        assert importlib.util.find_spec(f"vllm.{module}") is not None
        assert importlib.import_module(f"vllm.{module}").LLM is vllm.LLM
    for name in UNCALLED:
        with pytest.raises(NotImplementedError, match=f"nanovllm, which is vllm here, has no {name}: "):
            getattr(vllm, name)("anything", a=1)
    for code, advice in {
        "from vllm.config import SchedulerConfig": "vllm.config.SchedulerConfig: .*: docs/porting.md lists",
        "import vllm.v1.core.scheduler": "vllm.v1.core: .*: these are vLLM's inner classes",
        "from vllm.multimodal.image import load": "vllm.multimodal: .*: a prompt is text",
        "from vllm.assets.image import ImageAsset": "vllm.assets: .*: a prompt is text",
        "from vllm.entrypoints.chat_utils import load_chat_template": "load_chat_template: .*: chat and render_chat",
        "import vllm.entrypoints.openai.api_server": "vllm.entrypoints.openai: .*: nothing listens to HTTP",
        "import vllm.nothing": "No module named 'vllm.nothing'",
        "from vllm import nothing": "cannot import name 'nothing'",
    }.items():
        with pytest.raises(ImportError, match=advice):
            exec(code)
    with pytest.raises(AttributeError, match="which is vllm here, has no attribute 'beam_search': generate"):
        vllm.beam_search  # noqa: B018
    assert not hasattr(vllm, "__wrapped__")
    assert importlib.import_module("vllm.utils.network_utils").get_open_port() > 0
    assert not importlib.import_module("vllm.platforms").current_platform.is_rocm()


def test_defaults_are_vllms_and_what_would_mean_something_else_is_refused(vllm: Any) -> None:
    assert vllm.SamplingParams().max_tokens == 16 and vllm.SamplingParams(max_tokens=None).max_tokens is None
    assert vllm.SamplingParams(temperature=0.5).clone() == vllm.SamplingParams(temperature=0.5)
    with pytest.raises(TypeError, match="positional"):
        vllm.SamplingParams(0.5)
    with pytest.raises(AttributeError):
        vllm.SamplingParams().max_token = 3
    for given in ({"best_of": 2}, {"logits_processors": [print]}, {"truncate_prompt_tokens": 4}):
        assert given.keys() <= vllm.SamplingParams.__annotations__.keys(), "clients leave out what is not there"
        with pytest.raises(ValueError, match="which others have, is not supported here"):
            vllm.SamplingParams(**given)
    with pytest.raises(ValueError, match="hf_overrides, which others have, is not supported here"):
        vllm.LLM(BOX_MODEL, hf_overrides={"a": 1})
    with vllm.LLM(BOX_MODEL, **OPTIONS) as llm:
        assert llm.llm_engine.model_config.max_model_len == llm.model_config.max_model_len == 96
        assert llm.llm_engine.vllm_config.parallel_config.data_parallel_size == 1
        assert llm.get_default_sampling_params() == vllm.SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
        params = vllm.SamplingParams(temperature=0, ignore_eos=True)
        for ask in (llm.generate, llm.chat):
            prompt: Any = "hello" if ask == llm.generate else [{"role": "user", "content": "hello"}]
            (output,) = ask(prompt, params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 16
            assert len(ask(prompt, use_tqdm=False)[0].outputs[0].token_ids) <= 16
        with pytest.raises(NotImplementedError, match="vLLM's score"):
            llm.score("a", "b")


def test_objects_of_options_that_change_speed_alone_are_taken_and_change_no_token(vllm: Any) -> None:
    config = importlib.import_module("vllm.config")
    modes = importlib.import_module("vllm.config.compilation")
    compilation = config.CompilationConfig(mode=modes.CompilationMode.VLLM_COMPILE, cudagraph_capture_sizes=[1, 2])
    compilation.cudagraph_mode = config.CUDAGraphMode.FULL_AND_PIECEWISE
    params = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    for options in ({}, {"compilation_config": compilation, "attention_config": config.AttentionConfig(backend="a")}):
        with vllm.LLM(BOX_MODEL, **OPTIONS, **options) as llm:
            found.append(llm.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]
    message: Any = importlib.import_module("vllm.entrypoints.chat_utils").ChatCompletionMessageParam
    assert list[message].__args__ == (message,), "a type for annotations"


def test_stop_token_ids_above_the_vocabulary_change_nothing(vllm: Any) -> None:
    def make(*ids: int) -> Any:
        return vllm.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[*ids])

    with vllm.LLM(BOX_MODEL, **OPTIONS) as llm:
        size = llm.llm_engine.model_config.hf_config.vocab_size
        (free,) = llm.generate("hello", make(), use_tqdm=False)
        stop = free.outputs[0].token_ids[4]
        for ids in ([size, 10**9], [size, stop], [stop, size + 7]):
            expected = llm.generate("hello", make(*(i for i in ids if i < size)), use_tqdm=False)
            assert llm.generate("hello", make(*ids), use_tqdm=False)[0].token_ids == expected[0].token_ids
            assert llm.generate(["hello"], [make(*ids)], use_tqdm=False)[0].token_ids == expected[0].token_ids
        with pytest.raises(ValueError, match=rf"stop_token_ids has -1; the vocabulary is 0..{size - 1}"):
            llm.generate("hello", make(-1, size), use_tqdm=False)


def test_encode_gives_the_vectors_of_embed_and_cuts_long_prompts(vllm: Any) -> None:
    texts = ["the cat", "the cat sat " * 90]
    with vllm.LLM(BOX_MODEL, runner="pooling", renderer_num_workers=2, **OPTIONS) as llm:
        ids = [llm.get_tokenizer()(text).input_ids for text in texts]
        for limit, most in ((-1, 96), (5, 5)):
            found = llm.encode(texts, pooling_task="embed", truncate_prompt_tokens=limit, use_tqdm=False)
            expected = llm.embed([one[:most] for one in ids], use_tqdm=False)
            assert [one.outputs.data.tolist() for one in found] == [one.embedding.tolist() for one in expected]
            inner = llm.embed(texts, tokenization_kwargs={"truncate_prompt_tokens": limit}, use_tqdm=False)
            assert [one.embedding.tolist() for one in inner] == [one.embedding.tolist() for one in expected]
        with pytest.raises(
            ValueError, match=r"tokenization_kwargs, which others have, is not supported here as {'a': 1}"
        ):
            llm.embed(texts, tokenization_kwargs={"a": 1, "truncate_prompt_tokens": -1})
        for task in (None, "classify", "token_embed"):
            with pytest.raises(ValueError, match=r"pooling_task is .*; it must be one of embed"):
                llm.encode(texts[0], pooling_task=task)
        with pytest.raises(ValueError, match="truncate_prompt_tokens is 97; it must be -1, or 1 to max_model_len"):
            llm.embed(texts, truncate_prompt_tokens=97)


def test_a_tokenizer_that_is_set_brings_its_chat_template_or_is_refused(vllm: Any, tmp_path: Path) -> None:
    tokenizer = importlib.import_module("vllm.tokenizers").get_tokenizer(BOX_MODEL)
    tokenizer.chat_template = "say: {{ messages[0]['content'] }}"
    with vllm.LLM(BOX_MODEL, **OPTIONS) as llm:
        llm.set_tokenizer(tokenizer)
        assert llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)[0].prompt == "say: hello"
        tokenizer.add_tokens(["<new>"])
        with pytest.raises(ValueError, match="a tokenizer with other tokens: give LLM its folder as tokenizer="):
            llm.set_tokenizer(tokenizer)


def test_what_scripts_read_of_the_machine_and_the_environment(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    envs = importlib.import_module("vllm.envs")
    assert (envs.VLLM_LOGGING_LEVEL, envs.VLLM_USE_V1) == ("ERROR", None) and not hasattr(envs, "OTHER")
    platform = importlib.import_module("vllm.platforms").current_platform
    assert [platform.is_cpu(), platform.is_cuda()] == [platform.device_type == kind for kind in ("cpu", "cuda")]
    counter = importlib.import_module("vllm.utils").Counter(3)
    assert [next(counter), next(counter)] == [3, 4]
    assert vllm.Counter is importlib.import_module("vllm.v1.metrics.reader").Counter is not type(counter)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 0; .*there is no GPU here, .*: give 1"):
        vllm.LLM(BOX_MODEL, tensor_parallel_size=0)
    seeders = [importlib.import_module(f"vllm.{name}") for name in ("model_executor.utils", "utils.torch_utils")]
    assert seeders[0].set_random_seed is seeders[1].set_random_seed
    seeders[0].set_random_seed(3)
    with mock.patch("vllm.worker.worker.Worker._assert_memory_footprint_increased_during_profiling"):
        pass


def test_all_options_that_are_added_to_a_parser_are_set(vllm: Any) -> None:
    parser = vllm.EngineArgs.add_cli_args(ArgumentParser())
    added = {action.dest for action in parser._actions} - {"help"}
    assert added == vars(parser.parse_args([])).keys()
    given = parser.parse_args(["--model", str(BOX_MODEL), "--max-num-seqs", "3"])
    assert vllm.EngineArgs.from_cli_args(given).max_num_seqs == 3


def test_the_weights_of_the_folder_replace_random_ones(vllm: Any) -> None:
    params = vllm.SamplingParams(temperature=0)
    with vllm.LLM(BOX_MODEL, **OPTIONS) as llm:
        expected = llm.generate("1 + 2 =", params, use_tqdm=False)
    with vllm.LLM(BOX_MODEL, load_format="dummy", **OPTIONS) as llm:
        assert llm.generate("1 + 2 =", params, use_tqdm=False) != expected
        llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        llm.collective_rpc("reload_weights")
        assert llm.generate("1 + 2 =", params, use_tqdm=False) == expected
        for call in ({"method": "save"}, {"method": "update_config", "args": ({"a": 1},)}):
            with pytest.raises(NotImplementedError, match="is not answered: the ranks take no calls"):
                llm.collective_rpc(**call)


def test_a_reset_of_running_requests_changes_no_token(vllm: Any) -> None:
    prompts = draw_prompts([40, 3])
    params = vllm.SamplingParams(temperature=0, ignore_eos=True)
    with vllm.LLM(BOX_MODEL, kvcache_block_size=16, **OPTIONS) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.reset_prefix_cache()
        engine = llm.llm_engine
        for name, prompt in enumerate(prompts):
            engine.add_request(str(name), prompt, params)
        for _ in range(5):
            assert engine.step() == []
        with pytest.raises(RuntimeError, match="unfinished"):
            engine.reset_prefix_cache()
        engine.reset_prefix_cache(reset_running_requests=True)
        assert llm.stats()["num_preemptions"] == 0, "these are for want of room"
        assert llm.stats()["num_free_blocks"] == llm.stats()["num_blocks"]
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.token_ids for output in engine.step()}
    assert [found["0"], found["1"]] == expected


@pytest.mark.slow
def test_the_script_of_vllms_examples_replaces_models_and_nothing_else(tmp_path: Path) -> None:
    source = 'print(LLM, "org/model-1.5B", "text/plain", "a/b/c", "./model")'
    assert replace_models(source) == source.replace('"org/model-1.5B"', repr(str(BOX_MODEL)))
    (tmp_path / "good.py").write_text(
        "import beside, importlib.util\nassert importlib.util.find_spec('vllm') and beside"
    )
    (tmp_path / "beside.py").write_text("raise_error = False")
    (tmp_path / "bad.py").write_text("from vllm.multimodal import image")
    assert run_example(tmp_path / "good.py", 300) == (True, "status 0")
    did_run, reason = run_example(tmp_path / "bad.py", 300)
    assert not did_run and reason.startswith("ImportError: vllm.multimodal: nanovllm, which is vllm here, does not")


@pytest.mark.parametrize("resets", [True, False])
def test_a_trainer_gives_weights_one_by_one_with_a_reset_at_the_end_or_without(
    resets: bool, vllm: Any, tmp_path: Path
) -> None:
    for seed in (0, 1):
        save_random(tmp_path / str(seed), seed=seed)
    prompts = draw_prompts([3, 20])
    params = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with vllm.LLM(tmp_path / "1", **OPTIONS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with vllm.LLM(tmp_path / "0", **OPTIONS) as llm:
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        before = llm.generate(prompts, params, use_tqdm=False)
        *first, last = load_file(tmp_path / "1" / "model.safetensors").items()
        for pair in first:
            model.load_weights([pair])
        with pytest.raises(RuntimeError, match=r"or reset_prefix_cache\(\), under `nanovllm run`"):
            llm.generate(prompts, params, use_tqdm=False)
        model.load_weights([last])
        if resets:
            assert llm.reset_prefix_cache()
        after = llm.generate(prompts, params, use_tqdm=False)
        assert llm.reset_prefix_cache(), "without new weights, too"
    assert [output.token_ids for output in after] == [output.token_ids for output in expected]
    assert [output.token_ids for output in after] != [output.token_ids for output in before]


@pytest.fixture(scope="module")
def llm(reciter: Path) -> Iterator[VllmLLM]:
    with VllmLLM(reciter, max_model_len=64) as llm:
        yield llm


def test_a_missing_method_says_what_to_do_instead(llm: VllmLLM) -> None:
    for name in ("beam_search", "start_profile", "apply_model", "enqueue"):
        with pytest.raises(AttributeError, match=f"^LLM has no attribute '{name}': .{{15,}}"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^LLM has no attribute 'generat'$"):
        llm.generat  # noqa: B018


def test_vllms_loop_gives_each_request_once_with_all_its_completions(llm: VllmLLM) -> None:
    loop = engine.LLMEngine(llm)
    params = [SamplingParams(seed=3, max_tokens=n, n=n) for n in (1, 2)]
    for name, prompt, one in zip(("first", "second"), ("a", "b"), params, strict=True):
        loop.add_request(name, prompt, one, priority=1)
    with pytest.raises(RuntimeError, match="requests of add_request\\(\\) are unfinished"):
        loop.reset_prefix_cache()
    ended = {}
    while loop.has_unfinished_requests():
        ended |= {output.request_id: output for output in loop.step()}
    assert loop.step() == [] and loop.max_model_len == llm.max_model_len
    expected = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [*ended] == ["first", "second"] and [len(output.outputs) for output in ended.values()] == [1, 2]
    assert [output.text for output in ended.values()] == [output.text for output in expected]


def test_vllms_loop_ends_the_requests_that_are_named(llm: VllmLLM) -> None:
    loop = engine.LLMEngine(llm)
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate("b", params, use_tqdm=False)
    for name, n in (("running", 2), ("other", 1), ("waiting", 1)):
        if name == "waiting":
            loop.step()
        loop.add_request(name, "b", SamplingParams(seed=3, max_tokens=8, ignore_eos=True, n=n))
    loop.abort_request("running")
    loop.abort_request(["waiting", "nobody"])
    assert loop.get_num_unfinished_requests() == 1
    ended = []
    while loop.has_unfinished_requests():
        ended += loop.step()
    assert [(output.request_id, output.token_ids) for output in ended] == [("other", expected.token_ids)]
    loop.abort_request(["other"])
    assert llm.stats()["num_free_blocks"] == llm.stats()["num_blocks"]
    assert llm.generate("b", params, use_tqdm=False)[0].token_ids == expected.token_ids


def test_arguments_of_embed_that_cannot_be_had_are_refused() -> None:
    make: Any = PoolingParams
    assert make(task="embed", dimensions=3).dimensions == 3
    with pytest.raises(ValueError, match=r"late_chunking_params, which others have, .*: embed each chunk as a prompt"):
        make(late_chunking_params={"chunk_size": 3})
    with pytest.raises(TypeError, match="PoolingParams has no option 'dimension'; did you mean 'dimensions'"):
        make(dimension=3)


def test_options_on_a_command_line_make_an_engine() -> None:
    parser = engine.EngineArgs.add_cli_args(ArgumentParser())
    parser.set_defaults(model="tiny-qwen3", runner="pooling", max_model_len=None)
    args = parser.parse_args(["--max-num-seqs", "3", "--no-enable-prefix-caching"])
    expected = EngineConfig("tiny-qwen3", max_num_seqs=3, enable_prefix_caching=False)
    assert (
        EngineConfig.from_options(
            **{"options": {k: v for k, v in vars(args).items() if k != "model"}, "model": args.model}
        )
        == expected
    )
    options = engine.EngineArgs.from_cli_args(args)
    assert (
        vars(options) == vars(expected) and vars(engine.EngineArgs("tiny-qwen3", max_num_seqs=3))["max_num_seqs"] == 3
    )
    with VllmLLM.from_engine_args(options) as llm:
        assert llm.engine.config.max_num_seqs == 3


def test_what_options_in_one_object_lack_says_what_to_do_instead() -> None:
    options = engine.EngineArgs("tiny-qwen3", max_num_seqs=3)
    for name in ("kv_transfer_config", "mm_processor_kwargs"):
        with pytest.raises(AttributeError, match=f"^EngineArgs has no attribute '{name}': .{{15,}}"):
            getattr(options, name)
    with pytest.raises(AttributeError, match=r"^EngineArgs has no attribute 'max_num_seq'$"):
        options.max_num_seq  # noqa: B018
    assert copy.deepcopy(options) == options == pickle.loads(pickle.dumps(options))


def test_what_ray_reads_of_engine_args_is_there_and_loggers_are_refused() -> None:
    options = engine.EngineArgs("tiny-qwen3", max_num_seqs=3)
    known = options.create_engine_config()
    assert (known.scheduler_config.max_num_seqs, known.parallel_config.pipeline_parallel_size) == (3, 1)
    default = engine.EngineArgs("tiny-qwen3").create_engine_config().scheduler_config.max_num_seqs
    with VllmLLM("tiny-qwen3", device="cpu", dtype="float32", max_model_len=96) as llm:
        assert llm.engine.config.max_num_seqs == default
    for made in (NAMES["AsyncLLM"], engine.LLMEngine):
        with pytest.raises(ValueError, match=r"stat_loggers.*llm\.stats\(\)"):
            made.from_engine_args(options, stat_loggers=[print])
        with pytest.raises(TypeError, match="stat_logger"):
            made.from_engine_args(options, stat_logger=None)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0), ("max_tokens", 5), ("max_new_tokens", 5), ("stop", "a")]
)
def test_what_belongs_to_a_request_says_so_in_methods_too(name: str, value: Any, llm: VllmLLM) -> None:
    ours = name.replace("_new", "")
    advice = f"has no {ours}, because it belongs to a request: generate(prompts, SamplingParams({ours}={value!r}))"
    for call, what in ((llm.generate, "generate"), (llm.chat, "chat")):
        with pytest.raises(TypeError, match=re.escape(f"{what} {advice}")):
            call("a", **{name: value})


@pytest.mark.parametrize("method", ["generate", "chat", "embed", "sleep", "wake_up"])
def test_arguments_of_methods_are_answered_as_options_are(method: str, llm: VllmLLM) -> None:
    positional = {"sleep": [], "wake_up": []}.get(method, ["a"])
    call: Any = getattr(llm, method)
    for name in ACCEPTED["methods"].keys() - signature(call).parameters.keys():
        if name in ADVICE:
            with pytest.raises(
                ValueError, match=re.escape(f"{method}: {name}, which others have, is not supported here")
            ):
                call(*positional, **{name: {"x": 1}})
    with pytest.raises(TypeError, match=f"{method} has no option 'anything'; the options are"):
        call(*positional, anything=1)
    with pytest.raises(TypeError, match="did you mean"):
        llm.generate("a", use_tqmd=False)


def test_arguments_that_ask_for_nothing_change_nothing(llm: VllmLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    expected = llm.generate("a", params, use_tqdm=False)
    given: Any = {"lora_request": None, "priority": [1], "tokenization_kwargs": {}, "mm_processor_kwargs": None}
    assert llm.generate("a", params, use_tqdm=False, **given) == expected
