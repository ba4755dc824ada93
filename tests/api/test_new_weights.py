"""An engine with new weights is as a fresh engine with that checkpoint; a sleeping engine wakes up as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.any_models import save_any
from helpers.tiny import BLOCK, draw_prompts, save_random
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 96,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 24,
}
PROMPTS = draw_prompts([1, 15, 40, 33])
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def say(llm: LLM) -> list[list[int]]:
    # Triton's interpreter takes seconds for each step.
    is_slow = llm.engine.config.attention_backend == "triton"
    params = SamplingParams(temperature=0, max_tokens=2 if is_slow else 16, ignore_eos=True)
    prompts = PROMPTS[:2] if is_slow else PROMPTS
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def say_fresh(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(folder, **OPTIONS | options) as llm:
        return say(llm)


def read(folder: Path) -> list[tuple[str, Tensor]]:
    return list(load_file(folder / "model.safetensors").items())


@pytest.fixture(scope="module")
def new_tokens(folders: tuple[Path, Path]) -> list[list[int]]:
    """Return what a fresh engine says with the second checkpoint."""
    return say_fresh(folders[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of the same shape."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        save_random(root / str(seed), seed=seed)
    return root / "0", root / "1"


@pytest.mark.parametrize(
    ("tied", "backend"),
    [
        (True, "torch"),
        (True, "cpu"),
        (False, "torch"),
        (False, "cpu"),
        pytest.param(False, "triton", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_a_fresh_engine(tied: bool, backend: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        save_random(tmp_path / str(seed), seed=seed, tie_word_embeddings=tied)
    options = {"attention_backend": backend}
    expected = say_fresh(tmp_path / "1", **options)
    with LLM(tmp_path / "0", **OPTIONS | options) as llm:
        before = say(llm)
        llm.load_weights(read(tmp_path / "1"))
        assert say(llm) == expected != before
        llm.load_weights(read(tmp_path / "0"))
        assert say(llm) == before


@pytest.mark.parametrize("model_class", [Qwen2ForCausalLM, LlamaForCausalLM, Qwen3MoeForCausalLM])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family(model_class: type[PreTrainedModel], dtype: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        extra = EXPERTS if model_class is Qwen3MoeForCausalLM else {}
        save_random(tmp_path / str(seed), seed=seed, model_class=model_class, **extra)
    options = {"attention_backend": "cpu", "dtype": dtype}
    expected = say_fresh(tmp_path / "1", **options)
    with LLM(tmp_path / "0", **OPTIONS | options) as llm:
        llm.load_weights(read(tmp_path / "1"))
        assert say(llm) == expected


def test_a_load_may_come_in_parts_and_in_any_order(folders: tuple[Path, Path], new_tokens: list[list[int]]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        *first, last = read(folders[1])[::-1]
        for i in range(0, len(first), 3):
            llm.load_weights(iter(first[i : i + 3]), finish=False)
            with pytest.raises(RuntimeError, match=r"new weights are being loaded: .*load_weights\(\[\]\)"):
                say(llm)
        llm.load_weights([last])
        assert say(llm) == new_tokens


@pytest.mark.parametrize("ends", [lambda llm: say(llm), lambda llm: llm.sleep(), lambda llm: llm.reset_prefix_cache()])
def test_a_whole_model_ends_its_load_when_another_activity_begins(
    ends: Any, folders: tuple[Path, Path], new_tokens: list[list[int]]
) -> None:
    """Pass after pass; the head of a tied model may come last, and is compared with the embedding of its own pass."""
    with LLM(folders[0], **OPTIONS) as llm:
        before = say(llm)
        for expected, folder in [(new_tokens, folders[1]), (before, folders[0])] * 2:
            tensors = dict(read(folder))
            for pair in tensors.items():
                llm.load_weights([pair], finish=False)
            head = tensors["model.embed_tokens.weight"]
            with pytest.raises(ValueError, match="has other values than"):
                llm.load_weights([("lm_head.weight", head + 1)], finish=False)
            llm.load_weights([("lm_head.weight", head)], finish=False)
            ends(llm)
            llm.wake_up()
            assert say(llm) == expected
        llm.load_weights(list(tensors.items())[:1], finish=False)  # the last pass does not count for this one
        with pytest.raises(RuntimeError, match="new weights are being loaded"):
            say(llm)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_tied_model_with_its_head_may_come_again_before_a_request(
    is_reversed: bool, folders: tuple[Path, Path], new_tokens: list[list[int]]
) -> None:
    """The head is compared with the embedding of its own pass. Alone it does not end a load."""
    with LLM(folders[0], **OPTIONS) as llm:
        for folder in (folders[1], folders[0], folders[1]):
            tensors = dict(read(folder))
            head = tensors["model.embed_tokens.weight"]
            pairs = [*tensors.items(), ("lm_head.weight", head)]
            for pair in pairs[::-1] if is_reversed else pairs:
                llm.load_weights([pair], finish=False)
        assert say(llm) == new_tokens
        for pair in pairs:
            llm.load_weights([pair], finish=False)
        llm.load_weights([("lm_head.weight", head + 1)], finish=False)
        with pytest.raises(RuntimeError, match="new weights are being loaded"):
            say(llm)
        with pytest.raises(ValueError, match="has other values than"):
            llm.load_weights([("model.embed_tokens.weight", head)], finish=False)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_one_tensor_for_all_experts_loads_in_any_order(is_reversed: bool, tmp_path: Path) -> None:
    for seed in (0, 1):
        save_random(tmp_path / str(seed), seed=seed, model_class=Qwen3MoeForCausalLM, **EXPERTS)
    expected = say_fresh(tmp_path / "1")
    fused = list(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "1").state_dict().items())
    assert any(name.endswith("experts.down_proj") for name, _ in fused)
    with LLM(tmp_path / "0", **OPTIONS) as llm:
        for pair in fused[::-1] if is_reversed else fused:
            llm.load_weights([pair], finish=False)
        assert say(llm) == expected


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_bias_of_a_tied_head_comes_alone_or_with_all_and_the_embedding_stays(
    backend: str, quantization: str | None, tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": True}
    old = save_any(tmp_path / "old", "PhiForCausalLM", seed=0, **tied)
    new = save_any(tmp_path / "new", "PhiForCausalLM", seed=1, **tied)
    options = {"attention_backend": backend, "quantization": quantization}
    with LLM(tmp_path / "old", **OPTIONS | options) as llm:
        before = say(llm)
        for tensors in (old.state_dict(), {"lm_head.bias": old.state_dict()["lm_head.bias"]}):
            llm.load_weights(tensors.items())
            assert say(llm) == before
        llm.load_weights([("lm_head.bias", new.state_dict()["lm_head.bias"])])
        old.get_output_embeddings().bias.data.copy_(new.state_dict()["lm_head.bias"])
        old.save_pretrained(tmp_path / "mixed")
        assert say(llm) == say_fresh(tmp_path / "mixed", **options)


@pytest.mark.parametrize("name", ["ApertusForCausalLM", "GPTNeoXForCausalLM", "MixtralForCausalLM", "OPTForCausalLM"])
def test_names_of_files_and_of_modules_load_in_any_split(name: str, tmp_path: Path) -> None:
    """Numbers without a dimension, heads with a name of their own, and experts as one tensor or as many."""
    save_any(tmp_path / "old", name, seed=0)
    model = save_any(tmp_path / "new", name, seed=1)
    options = {"attention_backend": "torch", "model_impl": "transformers"}
    expected = say_fresh(tmp_path / "new", **options)
    with LLM(tmp_path / "old", **OPTIONS | options) as llm:
        for tensors in (load_file(tmp_path / "new" / "model.safetensors"), model.state_dict()):
            pairs = list(tensors.items())
            for calls in ([pairs], [[pair] for pair in pairs], [[pair] for pair in reversed(pairs)]):
                llm.load_weights(load_file(tmp_path / "old" / "model.safetensors").items())
                for call in calls:
                    llm.load_weights(call, finish=False)
                llm.load_weights([])
                assert say(llm) == expected


def test_a_parameter_that_its_tensors_do_not_cover_replaces_nothing(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.features import renewal

    def leave_out(model: Any, names: Any) -> Any:
        return (place for place in find_module_targets(model, names) if not place[1].endswith("k_proj.weight"))

    find_module_targets = renewal.find_module_targets
    monkeypatch.setattr(renewal, "find_module_targets", leave_out)
    llm = LLM(folders[0], **OPTIONS)
    with pytest.raises(RuntimeError, match=r"cover \d+ of the \d+ elements of .*qkv_proj.weight"):
        llm.load_weights([pair for pair in read(folders[1]) if not pair[0].endswith("k_proj.weight")])


def test_some_layers_may_be_replaced_alone(folders: tuple[Path, Path], tmp_path: Path) -> None:
    mixed = dict(read(folders[0])) | {name: value for name, value in read(folders[1]) if ".layers.1." in name}
    model = save_random(tmp_path)
    model.load_state_dict(mixed, strict=False)
    model.save_pretrained(tmp_path)
    with LLM(folders[0], **OPTIONS) as llm:
        llm.load_weights([(name, value) for name, value in read(folders[1]) if ".layers.1." in name])
        assert say(llm) == say_fresh(tmp_path)


def test_a_tied_model_takes_a_head_that_equals_its_embedding_and_no_other(
    folders: tuple[Path, Path], new_tokens: list[list[int]]
) -> None:
    """Whether both come in one call, or each in its own, in any order, number format and layout."""
    tensors = dict(read(folders[1]))
    embedding = {name: tensors.pop(name) for name in ["model.embed_tokens.weight"]}
    equal = {"lm_head.weight": embedding["model.embed_tokens.weight"].double().t().contiguous().t()}
    other = {"lm_head.weight": embedding["model.embed_tokens.weight"] + 1e-4}
    parts = [
        lambda head: [tensors | embedding | head],
        lambda head: [tensors | head, embedding],
        lambda head: [embedding, tensors, head],
    ]
    refusal = 'lm_head.weight has other values than .*folder whose config.json says "tie_word_embeddings": false'
    for split in parts:
        with LLM(folders[0], **OPTIONS) as llm:
            *first, last = split(other)
            for part in first:
                llm.load_weights(part.items(), finish=False)
            with pytest.raises(ValueError, match=refusal):
                llm.load_weights(last.items())
            for part in split(equal):
                llm.load_weights(part.items(), finish=False)
            llm.load_weights([])
            assert say(llm) == new_tokens
            lacking = r"the load is not complete: model\.embed_tokens\.weight must come, too.*finish=False"
            with pytest.raises(ValueError, match=lacking):
                llm.load_weights(equal.items())


def wrong_loads() -> dict[str, tuple[Any, str]]:
    q = "model.layers.0.self_attn.q_proj.weight"
    return {
        "unknown": ([("model.layers.9.mlp.up_proj.weight", torch.zeros(1))], "no weights called model.layers.9"),
        "shape": ([(q, torch.zeros(3, 3))], r"has shape \[3, 3\]; the model has \[128, 64\]"),
        "integers": ([(q, torch.zeros(128, 64, dtype=torch.int8))], "must be a tensor of floating-point numbers"),
        "no values": ([(q, torch.zeros(128, 64, device="meta"))], "must be a tensor of floating-point numbers"),
        "twice": ([(q, torch.zeros(128, 64)), (q, torch.zeros(128, 64))], "two tensors with the same name"),
        "nothing": (None, "load_weights got None; it must get pairs"),
        "no pairs": ([1, 2], "load_weights got 1"),
        "a dict": ({q: torch.zeros(128, 64)}, r"load_weights got {(.|\n)*such as tensors\.items"),
        "a number for a name": ([(5, torch.zeros(1))], r"load_weights got \(5, tensor"),
        "a list for a tensor": ([(q, [1.0])], r"q_proj.weight is \[1.0\]; it must be a tensor"),
        "not complete": ([(q, torch.zeros(128, 64))], "the load is not complete: .*k_proj.*v_proj"),
    }


def test_a_refused_load_leaves_the_old_weights(folders: tuple[Path, Path], new_tokens: list[list[int]]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        before = say(llm)
        for fault, (tensors, message) in wrong_loads().items():
            with pytest.raises(ValueError, match=message):
                llm.load_weights(tensors)
            assert say(llm) == before, fault
            llm.load_weights(read(folders[1]))
            assert say(llm) == new_tokens, fault
            llm.load_weights(read(folders[0]))


def test_a_load_that_fails_after_it_has_written_closes_the_engine(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folders[0], **OPTIONS)
    with pytest.raises(ValueError, match="the engine is closed"):
        llm.load_weights([("model.norm.weight", torch.ones(64)), *wrong_loads()["not complete"][0]], finish=False)
        llm.load_weights([])
    with pytest.raises(RuntimeError, match="closed"):
        say(llm)
    llm = LLM(folders[0], **OPTIONS)
    tensors = read(folders[1])
    backend = llm.engine.runner.backend
    monkeypatch.setattr(type(backend), "pack_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.load_weights(tensors)
    with pytest.raises(RuntimeError, match="closed"):
        say(llm)


def test_the_prefix_cache_is_forgotten(folders: tuple[Path, Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

        def count_cached() -> int:
            return llm.generate([PROMPTS[2]], params, use_tqdm=False)[0]["num_cached_tokens"]

        assert (count_cached(), count_cached()) == (0, 32)
        llm.load_weights(read(folders[1]))
        assert (count_cached(), count_cached()) == (0, 32)
        assert llm.reset_prefix_cache()
        assert count_cached() == 0


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_an_engine_wakes_up_as_it_was(level: int, backend: str, folders: tuple[Path, Path]) -> None:
    drafts = {"model": str(folders[1]), "num_speculative_tokens": 2}
    for extra in ({}, {"speculative_config": drafts}):
        with LLM(folders[0], **OPTIONS | extra, attention_backend=backend, enable_sleep_mode=True) as llm:
            before = say(llm)
            llm.sleep(level)
            runner = llm.engine.runner
            assert not runner.caches and hasattr(runner, "model") == (level == 1)
            for action in (lambda: say(llm), lambda: llm.add_request([1]), llm.sleep, lambda: llm.embed([[1]])):
                with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\) first"):
                    action()
            with pytest.raises(RuntimeError, match="asleep"):
                llm.load_weights(read(folders[1]))
            llm.wake_up()
            assert say(llm) == before
            llm.wake_up()  # once more does no harm
            llm.sleep(level)


@pytest.mark.parametrize(
    ("level", "tags"), [(1, ["weights"]), (2, ["weights"]), (2, ["kv_cache"]), (1, ["weights", "kv_cache"]), (2, None)]
)
def test_the_first_call_with_tags_wakes_up_everything_and_the_second_changes_nothing(
    level: int, tags: list[str] | None, folders: tuple[Path, Path], new_tokens: list[list[int]]
) -> None:
    """As a trainer does: it loads new weights, one a call, between two calls."""
    with LLM(folders[0], **OPTIONS) as llm:
        llm.load_weights(read(folders[0]))
        for _ in range(2):
            llm.sleep(level)
            llm.wake_up(tags=tags)
            assert llm.engine.runner.caches
            for pair in read(folders[1]):
                llm.load_weights([pair], finish=False)
            llm.wake_up(tags=["kv_cache"])
            llm.load_weights([])
            llm.wake_up(tags=["weights"])
            assert say(llm) == new_tokens
        for wrong in ("weights", ["weight"], 3):
            with pytest.raises(ValueError, match="weights"):
                llm.wake_up(tags=wrong)  # type: ignore[arg-type]


def test_replaced_weights_that_were_freed_must_come_again(folders: tuple[Path, Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        llm.load_weights(read(folders[1]))
        expected = say(llm)
        llm.sleep()
        llm.wake_up()
        assert say(llm) == expected  # level 1 keeps them
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(RuntimeError, match=r"were freed by sleep\(level=2\): call load_weights\(\) again"):
            say(llm)
        llm.load_weights(read(folders[1]))
        assert say(llm) == expected


def test_wrong_levels_and_unfinished_requests_are_refused(folders: tuple[Path, Path]) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        with pytest.raises(ValueError, match="level is 3; it must be 1"):
            llm.sleep(3)
        llm.add_request([1, 2], SamplingParams(max_tokens=4))
        for action in (llm.sleep, llm.reset_prefix_cache, lambda: llm.load_weights(read(folders[1]))):
            with pytest.raises(RuntimeError, match="unfinished"):
                action()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_two_ranks_take_their_shares(backend: str, folders: tuple[Path, Path]) -> None:
    """A fresh engine of one rank says the same."""
    options = {"attention_backend": backend}
    expected = say_fresh(folders[1], **options)
    with LLM(folders[0], **OPTIONS | options, tensor_parallel_size=2) as llm:
        before = say(llm)
        with pytest.raises(ValueError, match="not complete"):
            llm.load_weights(read(folders[1])[3:])
        assert say(llm) == before
        llm.load_weights((name, value.double()) for name, value in read(folders[1]))
        assert say(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(RuntimeError, match="were freed"):
            say(llm)
        llm.load_weights(read(folders[1]))
        assert say(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_the_stages_of_a_pipeline_take_their_layers(tied: bool, dtype: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        save_random(tmp_path / str(seed), seed=seed, tie_word_embeddings=tied, num_hidden_layers=3)
    options = {"attention_backend": "cpu", "dtype": dtype}
    expected = say_fresh(tmp_path / "1", **options)
    tensors = read(tmp_path / "1")
    old_tensors = read(tmp_path / "0")
    with LLM(tmp_path / "0", **OPTIONS | options, pipeline_parallel_size=2) as llm:
        before = say(llm)
        with pytest.raises(ValueError, match=r"not complete: model\.layers\.2\.mlp\.up_proj"):
            llm.load_weights([pair for pair in tensors if "layers.2.mlp.up_proj" not in pair[0]])
        assert say(llm) == before
        for i in range(0, len(tensors), 5):
            llm.load_weights(tensors[::-1][i : i + 5], finish=False)
        llm.load_weights([])
        assert say(llm) == expected
        llm.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            say(llm)
        llm.wake_up()
        assert say(llm) == expected
        llm.load_weights([pair for pair in old_tensors if ".layers.2." in pair[0]])
        llm.load_weights([pair for pair in old_tensors if ".layers.2." not in pair[0]])
        assert say(llm) == before
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(RuntimeError, match="were freed"):
            say(llm)
        llm.load_weights(tensors)
        assert say(llm) == expected


@pytest.mark.slow
def test_a_rank_that_dies_during_a_load_is_an_error(folders: tuple[Path, Path]) -> None:
    import os
    import signal

    llm = LLM(folders[0], **OPTIONS, tensor_parallel_size=2)
    os.kill(llm.engine.runner.pids[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1"):
        for _ in range(1000):
            llm.load_weights(read(folders[1]))
    with pytest.raises(RuntimeError, match="closed"):
        say(llm)
