"""A folder of sentence-transformers gives the vectors that its files ask for, or is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import BLOCK, SMALL, draw_prompts, edit_json
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.engine.pooling import add_states

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 160,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 13,  # room for little more than one long prompt
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,  # long prompts are cut into chunks
}
PREFIX, *REST = draw_prompts([40, 1, 15, 16, 17, 70, 160])
PROMPTS = [*REST, PREFIX + REST[1], PREFIX + REST[3], PREFIX]
SIZE = 64
OLD = {"Transformer": "models", "Pooling": "models", "Dense": "models", "Normalize": "models"}
NEW = {
    **{"Transformer": "base.modules.transformer", "Pooling": "sentence_transformer.modules.pooling"},
    **{"Dense": "base.modules.dense", "Normalize": "base.modules.normalize"},
}


def save_modules(
    folder: Path, pooling: dict[str, Any], *rest: str, classes: dict[str, str] = OLD, **dense: Any
) -> dict[str, torch.Tensor]:
    """Write modules.json and the files that it names. Return the tensors of the last Dense.

    Args:
        pooling: the content of the Pooling's config.json.
        rest: the classes of the modules after the Pooling.
        classes: where each class is: sentence-transformers has moved them.
        dense: changes of the config.json of each Dense.
    """
    modules = []
    tensors = {}
    for i, kind in enumerate(["Transformer", "Pooling", *rest]):
        path = f"{i}_{kind}" if i else ""
        modules.append(
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{classes[kind]}.{kind}"}
        )
        if path and kind != "Normalize":  # older versions write no folder for it
            (folder / path).mkdir(exist_ok=True)
            config: dict[str, Any] = pooling
            if kind == "Dense":
                config = {"in_features": SIZE, "out_features": SIZE // 2, "bias": True} | dense
                generator = torch.Generator().manual_seed(i)
                shape = (config["out_features"], config["in_features"])
                tensors = {"linear.weight": torch.randn(shape, generator=generator) / 9}
                if config["bias"]:
                    tensors["linear.bias"] = torch.randn(shape[0], generator=generator)
                save_file(tensors, folder / path / "model.safetensors")
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(modules))
    return tensors


@pytest.fixture
def folder(random_model: Path, tmp_path: Path) -> Path:
    """A copy of the random model. It has no files of sentence-transformers yet."""
    return copytree(random_model, tmp_path / "model")


@pytest.fixture(scope="module")
def model(random_model: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()


@torch.inference_mode()
def pool(model: Qwen3ForCausalLM, prompt: list[int], mode: str) -> torch.Tensor:
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode]


def embed(llm: LLM, prompts: Any = PROMPTS, **options: Any) -> list[np.ndarray]:
    return [output.embedding for output in llm.embed(prompts, use_tqdm=False, **options)]


def old_spelling(mode: str) -> dict[str, Any]:
    names = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{name}": own == mode for own, name in names.items()}
    others = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
    return {"word_embedding_dimension": SIZE, **flags, **{f"pooling_mode_{name}": False for name in others}}


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("is_old", [True, False], ids=["old", "new"])
@pytest.mark.parametrize("ends_normalised", [True, False])
def test_vectors_are_those_of_the_asked_pooling(
    mode: str, is_old: bool, ends_normalised: bool, folder: Path, model: Qwen3ForCausalLM
) -> None:
    config = old_spelling(mode) if is_old else {"embedding_dimension": SIZE, "pooling_mode": mode}
    save_modules(folder, config, *["Normalize"] * ends_normalised, classes=OLD if is_old else NEW)
    with LLM(folder, **OPTIONS) as llm:
        raw = embed(llm, normalize=False)
        cut = embed(llm, normalize=False, dimensions=5)
        normalised = embed(llm)
        cached = [output.num_cached_tokens for output in llm.embed(PROMPTS, use_tqdm=False)]
    for prompt, plain, short, unit in zip(PROMPTS, raw, cut, normalised, strict=True):
        expected = pool(model, prompt, mode)
        np.testing.assert_allclose(unit, normalize(expected, dim=0), atol=2e-5)
        expected = normalize(expected, dim=0) if ends_normalised else expected
        np.testing.assert_allclose(plain, expected, atol=2e-5, rtol=2e-5)
        np.testing.assert_allclose(short, expected[:5], atol=2e-5, rtol=2e-5)
    assert any(cached) == (mode == "lasttoken"), "a hidden state that counts must be computed"


def test_a_folder_without_a_mode_asks_for_the_mean(folder: Path, model: Qwen3ForCausalLM) -> None:
    save_modules(folder, {"word_embedding_dimension": SIZE})
    with LLM(folder, **OPTIONS) as llm:
        for prompt, vector in zip(PROMPTS, embed(llm, normalize=False), strict=True):
            np.testing.assert_allclose(vector, pool(model, prompt, "mean"), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_bits_do_not_depend_on_batch_chunks_cache_or_preemption(mode: str, folder: Path) -> None:
    save_modules(folder, {"pooling_mode": mode}, "Dense")
    options = OPTIONS | {"attention_backend": "cpu"}
    embedding = SamplingParams(max_tokens=0, embed=True)
    with LLM(folder, **options | {"enable_prefix_caching": False}) as llm:
        alone = [embed(llm, [prompt], normalize=False)[0].tobytes() for prompt in PROMPTS]
        assert [vector.tobytes() for vector in embed(llm, normalize=False)] == alone
    with LLM(folder, **options | {"max_num_batched_tokens": 7}) as llm:
        for _ in range(2):  # the second time every block is in the cache
            assert [vector.tobytes() for vector in embed(llm, normalize=False)] == alone
    generating = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(folder, **options | {"num_kvcache_blocks": 10, "max_num_batched_tokens": 9}) as llm:
        requests: list[Any] = []
        for prompt in PROMPTS:
            requests += [([1, 2], generating), (prompt, embedding), ([3, 4], generating)]
        outputs = dict(llm.stream(requests))
        assert llm.stats()["num_preemptions"]
    assert [outputs[i]["embedding"].tobytes() for i in range(1, len(requests), 3)] == alone


@pytest.mark.slow
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_pool_alike(option: str, folder: Path, model: Qwen3ForCausalLM) -> None:
    save_modules(folder, {"pooling_mode": "mean"}, "Normalize")
    with LLM(folder, **OPTIONS, **{option: 2}) as llm:
        for prompt, vector in zip(PROMPTS, embed(llm, normalize=False), strict=True):
            np.testing.assert_allclose(vector, normalize(pool(model, prompt, "mean"), dim=0), atol=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_has_the_same_bits_however_its_states_are_cut(seed: int) -> None:
    draw = np.random.default_rng(seed)
    states = (draw.normal(size=(300, 70)) * 10.0 ** draw.integers(-9, 9, (300, 70))).astype(np.float32)
    expected = states[0].astype(np.float64)
    for state in states[1:]:
        expected = expected + state
    for num_cuts in (0, 1, 5, 299):
        total = None
        for chunk in np.split(states, np.sort(draw.choice(np.arange(1, 300), num_cuts, replace=False))):
            total = add_states(total, chunk)
        assert total is not None and total.tobytes() == expected.tobytes()


def test_only_the_first_token_is_computed_where_it_alone_counts(folder: Path) -> None:
    save_modules(folder, {"pooling_mode": "cls"})
    with LLM(folder, **OPTIONS) as llm:
        embed(llm)
        assert llm.stats()["num_steps"] <= 2 < len(PROMPTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tanh", "identity"])
def test_a_dense_follows_the_pooling(kind: str, dtype: torch.dtype, folder: Path, model: Qwen3ForCausalLM) -> None:
    """Behind a Normalize, which is not the last module; and twice."""
    changes: dict[str, Any] = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    tensors = save_modules(
        folder, {"pooling_mode": "mean"}, "Normalize", "Dense", **changes if kind == "identity" else {}
    )
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, folder / "3_Dense" / "model.safetensors")
    with LLM(folder, **OPTIONS) as llm:
        vectors = embed(llm, normalize=False)
        assert llm.engine.facts.embedding_size == SIZE // 2
        with pytest.raises(ValueError, match=f"dimensions is {SIZE}; it must be at most {SIZE // 2}"):
            embed(llm, dimensions=SIZE)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        expected = normalize(pool(model, prompt, "mean"), dim=0) @ tensors["linear.weight"].float().T
        if kind == "tanh":
            expected = (expected + tensors["linear.bias"].float()).tanh()
        np.testing.assert_allclose(vector, expected, atol=2e-5)


def change_pooling(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "1_Pooling" / "config.json", **changes)


def change_dense(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "2_Dense" / "config.json", **changes)


def fill_dense_with_nan(folder: Path) -> None:
    path = folder / "2_Dense" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"linear.weight": torch.full_like(tensors["linear.weight"], torch.nan)}, path)


def change_text(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "sentence_bert_config.json", **changes)


def change_modules(number: int, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        modules[number] |= changes
        (folder / "modules.json").write_text(json.dumps(modules))

    return change


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "max": (change_pooling(pooling_mode="max"), "pooling_mode is 'max'; it must be one of lasttoken, cls, mean"),
    "two modes": (change_pooling(pooling_mode=["cls", "mean"]), r"pooling_mode is \['cls', 'mean'\]"),
    "two flags": (
        change_pooling(pooling_mode=None, pooling_mode_cls_token=True, pooling_mode_weightedmean_tokens=True),
        r"pooling_mode is \['cls', 'weightedmean'\]",
    ),
    "strange key": (change_pooling(late=True), r"1_Pooling/config.json has 'late' \(True\)"),
    "another module": (change_modules(2, type="sentence_transformers.models.LSTM"), "modules.json names LSTM"),
    "no pooling": (change_modules(1, type="sentence_transformers.models.Dense"), "begins with Transformer, Dense"),
    "code": (change_modules(0, type="own_code.Transformer"), "names 'own_code.Transformer': code from models"),
    "elsewhere": (change_modules(2, path="../dense"), r"path is '\.\./dense'"),
    "inner model": (change_modules(0, path="0_Transformer"), "begins with Transformer, Pooling; .* at the path"),
    "odd list": (lambda folder: (folder / "modules.json").write_text("5"), "modules.json is no list of modules"),
    "no list": (lambda folder: (folder / "modules.json").unlink(), "has 1_Pooling, and no modules.json"),
    "no file": (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "1_Pooling/config.json cannot be read"),
    "relu": (change_dense(activation_function="torch.nn.ReLU"), "activation_function is 'torch.nn.ReLU'"),
    "tokens": (change_dense(module_input_name="token_embeddings"), "module_input_name is 'token_embeddings'"),
    "modes in lists": (change_pooling(pooling_mode=[["mean"]]), r"pooling_mode is \[\['mean'\]\]"),
    "activations": (change_dense(activation_function=["torch.nn.Tanh"]), r"activation_function is \['torch.nn.Tanh'\]"),
    "not finite": (fill_dense_with_nan, "linear.weight has values that are no finite numbers"),
    "residual": (change_dense(use_residual=True), "use_residual is true"),
    "size": (change_dense(in_features=3, out_features=5), r"tensors of the shapes .*; they must be .*\[5, 64\]"),
    "no weights": (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "model.safetensors cannot be"),
    "lower case": (change_text(do_lower_case=True), "do_lower_case is True; it must be False"),
    "chat": (change_text(modality_config={"message": {"method": "forward"}}), "modality_config is {'message'"),
    "arguments": (change_text(tokenizer_args={"model_max_length": 5}), "tokenizer_args is {'model_max_length': 5}"),
    "text key": (change_text(pad_to=5), r"sentence_bert_config.json has 'pad_to' \(5\)"),
    "sparse": (
        lambda folder: edit_json(folder / "config_sentence_transformers.json", model_type="SparseEncoder"),
        "model_type is 'SparseEncoder'",
    ),
    "no prompt": (
        lambda folder: edit_json(folder / "config_sentence_transformers.json", default_prompt_name="q", prompts={}),
        "default_prompt_name is 'q'",
    ),
}


def test_what_cannot_be_had_is_refused_by_name_and_the_folder_generates(folder: Path, tmp_path: Path) -> None:
    save_modules(folder, {"pooling_mode": "mean"}, "Dense", "Normalize")
    edit_json(folder / "sentence_bert_config.json", max_seq_length=100, do_lower_case=False)
    for name, (change, message) in REFUSED.items():
        broken = copytree(folder, tmp_path / name)
        change(broken)
        with LLM(broken, **SMALL) as llm:
            assert llm.generate([[1, 2]], SamplingParams(0, 2), use_tqdm=False)
            with pytest.raises(ValueError, match="this model's vectors cannot be made: .*" + message):
                llm.embed([[1, 2]], use_tqdm=False)


def test_a_model_that_only_embeds_is_refused_when_it_is_loaded(folder: Path, model: Qwen3ForCausalLM) -> None:
    model.model.save_pretrained(folder)
    save_modules(folder, {"pooling_mode": "max"})
    with pytest.raises(ValueError, match="pooling_mode is 'max'"):
        LLM(folder, **SMALL)


def test_a_text_gets_the_default_prompt_and_at_most_the_tokens_that_the_folder_allows(
    reciter: Path, tmp_path: Path
) -> None:
    folder = copytree(reciter, tmp_path / "model")
    save_modules(folder, {"pooling_mode": "mean"}, "Normalize")
    edit_json(
        folder / "config_sentence_transformers.json",
        **{"prompts": {"query": "ask: ", "document": ""}, "default_prompt_name": "query", "truncate_dim": 9},
    )
    edit_json(folder / "sentence_bert_config.json", max_seq_length=12)
    asked = SamplingParams(max_tokens=0, embed=True)
    with LLM(folder, max_model_len=32, dtype="float32") as llm:
        text, told, ids = llm.embed(["abc", {"prompt": "abc"}, llm.tokenizer.encode("ask: abc")], use_tqdm=False)
        assert text.prompt_token_ids == told.prompt_token_ids == ids.prompt_token_ids
        assert text.embedding.tolist() == told.embedding.tolist() == ids.embedding.tolist()
        assert len(text.embedding) == 9 and len(llm.embed("abc", dimensions=20)[0].embedding) == 20
        assert llm.prepare("abc", asked).prompt_token_ids.tolist() == text.prompt_token_ids
        assert llm.submit("abc", asked).result()["prompt_token_ids"] == text.prompt_token_ids
        assert llm.generate("abc", SamplingParams(0, 1), use_tqdm=False)[0].prompt == "abc", "no vector is wanted"
        with pytest.raises(ValueError, match=r"the prompt has 13 tokens, .* limits a text to 12 \(max_seq_length"):
            llm.embed("a" * 8)
        assert llm.generate("a" * 13, SamplingParams(0, 1), use_tqdm=False)
    (folder / "sentence_bert_config.json").unlink()
    edit_json(folder / "tokenizer_config.json", model_max_length=10)  # where newer versions save it
    change_pooling(include_prompt=False)(folder)
    with (
        LLM(folder, max_model_len=32, dtype="float32") as llm,
        pytest.raises(ValueError, match="include_prompt is false"),
    ):
        llm.embed("a")
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name=None)
    with (
        LLM(folder, max_model_len=32, dtype="float32") as llm,
        pytest.raises(ValueError, match=r"has 11 tokens.* to 10"),
    ):
        llm.embed(["a" * 10, "a" * 11])


def test_jobs_and_streams_give_the_same_vectors(reciter: Path, tmp_path: Path) -> None:
    from helpers.batch_jobs import read_answers, write_lines

    from nanovllm.apps.jobs.job import Job, Status
    from nanovllm.apps.jobs.run import run_job

    folder = copytree(reciter, tmp_path / "model")
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    save_modules(folder, {"pooling_mode": "mean"}, "Dense", "Normalize", in_features=size)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 32, "num_kvcache_blocks": 8}
    with LLM(folder, **options) as llm:
        (unit,) = embed(llm, ["abc"])
        (cut,) = embed(llm, ["abc"], dimensions=3)
        ((_, streamed),) = llm.stream([("abc", SamplingParams(max_tokens=0, embed=True))])
        assert np.linalg.norm(streamed["embedding"]) != pytest.approx(1), "only embed() applies a last Normalize"
        np.testing.assert_allclose(streamed["embedding"] / np.linalg.norm(streamed["embedding"]), unit, atol=1e-6)
    lines = [{"input": "abc"}, {"input": "abc", "dimensions": 3}]
    source = write_lines(tmp_path / "in", lines)
    job = Job(str(source), str(tmp_path / "out"), EngineConfig(str(folder), **options), "model")
    assert run_job(job) == Status.OK
    answers = {answer["id"]: answer["response"]["body"]["data"][0] for answer in read_answers(tmp_path / "out")}
    assert answers["batch_req_1"]["embedding"] == unit.tolist() and answers["batch_req_2"]["embedding"] == cut.tolist()
    change_pooling(pooling_mode="cls")(folder)
    (tmp_path / "out").write_bytes((tmp_path / "out").read_bytes().splitlines(keepends=True)[0])
    assert run_job(job) == Status.USAGE, "the folder makes other vectors now"
