"""Requests that name adapters get what an engine that was loaded with the adapter gives, and the weights follow."""

import logging
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.adapters import LINEAR, save_adapter
from helpers.hybrids import save_hub_form
from helpers.tiny import BLOCK, draw_prompts, edit_json, save_random, save_reciter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM, LoRARequest, Output, SamplingParams
from nanovllm.features.renewal import Renewal, WeightLoad

pytest.importorskip("peft")

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cpu",
    "attention_backend": "cpu",
    "max_model_len": 96,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 64,
    "max_num_seqs": 4,
}
PROMPTS = draw_prompts([1, 15, 40, 33, 20, 18])
PARAMS = SamplingParams(temperature=0.8, max_tokens=10, ignore_eos=True, logprobs=2)
SEEDED = replace(PARAMS, seed=1)


class Case(NamedTuple):
    """A model, and two adapters of it."""

    model: Path
    adapters: tuple[Path, Path]

    @property
    def requests(self) -> tuple[LoRARequest, LoRARequest]:
        first, second = self.adapters
        return LoRARequest("first", 1, str(first)), LoRARequest("second", 2, str(second))


def save_case(root: Path, model: PreTrainedModel, targets: list[str] = LINEAR, others: list[str] | None = None) -> Case:
    """Write two adapters of the model in the folder "model" of root: one changes `targets`, and the other `others`."""
    read = type(model).from_pretrained
    save_adapter(read(root / "model"), root / "first", target_modules=targets)
    save_adapter(read(root / "model"), root / "second", seed=2, r=3, target_modules=others or ["q_proj", "down_proj"])
    return Case(root / "model", (root / "first", root / "second"))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("adapters")
    return save_case(root, save_random(root / "model"))


def run(llm: LLM, lora_request: Any = None, params: Any = PARAMS, prompts: Any = PROMPTS) -> list[Output]:
    return llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)


def run_fresh(case: Case, which: int | None, params: Any = PARAMS, prompts: Any = PROMPTS, **options: Any) -> Any:
    lora = None if which is None else str(case.adapters[which])
    with LLM(case.model, lora=lora, **OPTIONS | options) as llm:
        return run(llm, None, params, prompts)


def are_equal(one: Output, other: Output) -> bool:
    """Return whether tokens and log-probabilities have the same bits."""

    def read(output: Output) -> list[torch.Tensor]:
        values: list[Any] = []
        for completion in output.outputs:
            values.append(completion.token_ids)
            values += [[*each, *each.values()] for each in completion.logprobs or []]
        return [torch.tensor(value, dtype=torch.float64) for value in values]

    mine = read(one)
    theirs = read(other)
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


MIX = (0, None, 1, 0, None, 1)


def check_mix(
    case: Case, params: SamplingParams = PARAMS, prompts: Any = PROMPTS, stages: int = 1, **options: Any
) -> None:
    """Compare a list whose requests name two adapters and none with engines that were loaded so.

    Args:
        stages: how many stages the engine with the list has. The others have one, which gives the same bits.
    """
    expected = {which: run_fresh(case, which, params, prompts, **options) for which in (None, 0, 1)}
    assert not all(map(are_equal, expected[None], expected[0])) and not all(map(are_equal, expected[1], expected[0]))
    with LLM(case.model, pipeline_parallel_size=stages, **OPTIONS | options) as llm:
        named = [None if which is None else case.requests[which] for which in MIX]
        for i, output in enumerate(run(llm, named, params, prompts)):
            assert output.lora_request is named[i]
            assert are_equal(output, expected[MIX[i]][i]), i


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "given"},
        {"quantization": "int8"},
        {"quantization": "int8-dynamic", "dtype": "float32"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"num_kvcache_blocks": 9, "max_num_batched_tokens": 24},
    ],
    ids=["plainly", "in the given order", "int8", "int8-dynamic", "with drafts", "with little memory"],
)
def test_tokens_are_those_of_an_engine_with_the_adapter(options: dict[str, Any], case: Case) -> None:
    """Without a seed, too: it comes from the number in the given order. And with n > 1."""
    check_mix(case, replace(PARAMS, n=2) if not options else PARAMS, **options)


@pytest.mark.parametrize("kind", ["biases, and an untied head", "a hybrid, with a part for pictures"])
def test_families(kind: str, tmp_path: Path) -> None:
    if kind.startswith("a hybrid"):
        model = save_hub_form(tmp_path / "model")
        case = save_case(tmp_path, model, [*LINEAR, "in_proj_qkv", "in_proj_a", "out_proj"])
    else:
        model = save_random(tmp_path / "model", model_class=Qwen2ForCausalLM, tie_word_embeddings=False)
        case = save_case(tmp_path, model, [*LINEAR, "lm_head"])
    check_mix(case)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["plainly", "int8"])
def test_experts_and_the_router_have_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    """As PEFT wrote them when each expert was a module of its own: two matrices for each matrix of an expert."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = save_random(tmp_path / "model", model_class=Qwen3MoeForCausalLM, **sizes)
    case = save_case(tmp_path, model, ["q_proj", "o_proj"], ["k_proj"])
    shapes = {name: value.shape for name, value in load_file(case.model / "model.safetensors").items()}
    for adapter, kinds in zip(case.adapters, ((".experts.", ".gate."), (".experts.1.down_proj.",)), strict=True):
        tensors = load_file(adapter / "adapter_model.safetensors")
        rank = min(next(iter(tensors.values())).shape)
        changed = [name for name in shapes if ".mlp." in name and any(kind in name for kind in kinds)]
        assert len(changed) == (26 if len(kinds) == 2 else 2)
        for name in changed:
            rows, columns = shapes[name]
            path = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns) / 4
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, rank) / 8
        save_file(tensors, adapter / "adapter_model.safetensors")
    check_mix(case, **options)


def test_a_draft_model_guesses_for_every_adapter_and_stays_as_it_is(case: Case) -> None:
    """It is the model itself, so every guess is right as long as no adapter is in the weights."""
    from helpers.fakes_drafts import FREE

    drafts = {"model": str(case.model), "num_speculative_tokens": 2}
    with LLM(case.model, **OPTIONS, speculative_config=drafts) as llm:
        llm.engine.scheduler.speculation.costs = FREE  # every draft pays
        wrong = []
        for which in (None, 0, 1, None):
            before = llm.stats()
            outputs = run(llm, None if which is None else case.requests[which], SEEDED)
            assert all(map(are_equal, outputs, run_fresh(case, which, SEEDED)))
            drafted, accepted = (
                llm.stats()[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens")
            )
            assert drafted > 10
            wrong.append(drafted - accepted)
    assert wrong[0] == wrong[3] == 0 < min(wrong[1:3])


def test_grammars_and_conversations(tmp_path: Path) -> None:
    save_reciter(tmp_path / "model", head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    case = save_case(tmp_path, model, ["lm_head"], ["lm_head"])  # its layers add nothing
    params = SamplingParams(temperature=8, max_tokens=8, structured_outputs={"regex": "[a-z]{6}"}, logprobs=1, seed=5)
    check_mix(case, params, ["a", "b", "c", "A", "0", "xyz"])
    messages: Any = [[{"role": "user", "content": text}] for text in "abc"]
    with LLM(case.model, lora=str(case.adapters[0]), **OPTIONS) as llm:
        expected = llm.chat(messages, params, use_tqdm=False)
    with LLM(case.model, **OPTIONS) as llm:
        answers = llm.chat(messages, params, use_tqdm=False, lora_request=case.requests[0])
        assert all(map(are_equal, answers, expected))
        assert [answer.lora_request for answer in answers] == [case.requests[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2, "quantization": "int8"}, {"stages": 2}], ids=str)
def test_ranks_and_stages_read_their_shares(options: dict[str, Any], case: Case) -> None:
    check_mix(case, **options)


# ---- what stays in the weights, and in the cache


def test_the_model_as_it_was_comes_back_for_whatever_names_no_adapter(case: Case) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    greedy = [output["token_ids"] for output in run_fresh(case, None, params)]

    def loop(llm: LLM) -> Any:
        llm.add_request(PROMPTS[2], params)
        while not llm.is_finished():
            ended, _ = llm.step()
        return ended[0][1]

    with LLM(case.model, **OPTIONS) as fresh:
        vector = fresh.embed([PROMPTS[2]], use_tqdm=False)[0]["embedding"].tolist()
        score = fresh.score([PROMPTS[2]], [[3, 4]], use_tqdm=False)[0]["logprobs"]
    uses: list[tuple[Callable[[LLM], Any], Any]] = [
        (lambda llm: run(llm, None, params)[2]["token_ids"], greedy[2]),
        (lambda llm: llm.submit(PROMPTS[2], params).result()["token_ids"], greedy[2]),
        (lambda llm: next(iter(llm.stream([PROMPTS[2]], params)))[1]["token_ids"], greedy[2]),
        (loop, greedy[2]),
        (lambda llm: llm.embed([PROMPTS[2]], use_tqdm=False)[0]["embedding"].tolist(), vector),
        (lambda llm: llm.score([PROMPTS[2]], [[3, 4]], use_tqdm=False)[0]["logprobs"], score),
        (lambda llm: [llm.sleep(2), llm.wake_up(), run(llm, None, params)[2]["token_ids"]][-1], greedy[2]),
        (lambda llm: run(llm, [None] * len(PROMPTS), params)[2]["token_ids"], greedy[2]),
    ]
    for use, expected in uses:
        with LLM(case.model, **OPTIONS) as llm:
            run(llm, case.requests[0])
            assert use(llm) == expected


def test_a_change_is_logged_with_its_cost_and_happens_only_when_the_adapter_is_another(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nanovllm.features.adapters.groups")
    first, second = case.requests
    names = load_file(case.model / "model.safetensors")
    num_bytes = sum(names[name].nbytes for name in names if "proj" in name)
    with LLM(case.model, **OPTIONS) as llm:
        for lora_request in (None, first, first, [second, first, None, second, first, None]):
            run(llm, lora_request)
        found = [re.sub(r"'.*/|'", "", record.message.split(" is in")[0]) for record in caplog.records]
        assert found == ["the adapter first", "the adapter second", "the model without an adapter"]
        assert re.search(rf": \d+\.\d\d s, {num_bytes / 1e6:.1f} MB of the checkpoint read", caplog.text)
        ref = weakref.ref(llm.engine)
    del llm
    assert ref() is None, "an engine that had adapters is freed at once"


def test_each_adapter_finds_its_own_blocks_and_new_weights_forget_all(case: Case, tmp_path: Path) -> None:
    first, second = case.requests
    renamed = tmp_path / "elsewhere"
    renamed.mkdir()
    for path in case.adapters[0].iterdir():
        (renamed / path.name).write_bytes(path.read_bytes())
    with LLM(case.model, **OPTIONS) as llm:

        def count_cached(lora_request: Any) -> int:
            return run(llm, lora_request, prompts=[PROMPTS[2]])[0]["num_cached_tokens"]

        assert [count_cached(one) for one in (first, second, None)] == [0, 0, 0]
        assert [count_cached(one) for one in (first, second, None)] == [32, 32, 32]
        assert count_cached(LoRARequest("by content, not by name", 7, str(renamed))) == 32
        edit_json(renamed / "adapter_config.json", lora_alpha=13)
        assert count_cached(LoRARequest("", 7, str(renamed))) == 0
        llm.load_weights(load_file(case.model / "model.safetensors").items())
        assert (count_cached(None), count_cached(None)) == (0, 32)
        with pytest.raises(ValueError, match=r"lora_request names an adapter.*load_weights\(\) has replaced"):
            run(llm, first)


def test_new_weights_for_some_layers_find_the_others_without_an_adapter(case: Case) -> None:
    tensors = load_file(case.model / "model.safetensors")
    with LLM(case.model, **OPTIONS) as llm:
        run(llm, case.requests[0])
        llm.load_weights((name, value) for name, value in tensors.items() if ".layers.1." in name)
        params = replace(PARAMS, temperature=0)
        assert all(map(are_equal, run(llm, None, params), run_fresh(case, None, params)))


def test_one_module_at_a_time_is_in_memory_twice(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values wait in `staged` of their module, and nowhere else, until they replace the old ones."""
    staged = []
    replace_module = WeightLoad._replace

    def note(self: WeightLoad, path: str) -> None:
        staged.append([values.nbytes for module in self._modules.values() for values in module.staged.values()])
        replace_module(self, path)

    monkeypatch.setattr(WeightLoad, "_replace", note)
    with LLM(case.model, **OPTIONS) as llm:
        run(llm, case.requests[0])
    of_a_layer = (256 * 64, 64 * 128, 192 * 64, 64 * 96)  # q, k and v; o; gate and up; down
    assert sorted(staged) == sorted([2 * size] for size in of_a_layer * 2)


# ---- refusals


def test_engines_that_cannot_have_adapters_refuse_them_by_name(case: Case) -> None:
    first = case.requests[0]
    cases = [
        ({"lora": str(case.adapters[1])}, "lora is .*; it must be left out .* where requests have lora_request"),
        ({"load_format": "dummy"}, "lora_request needs a checkpoint.*dummy"),
    ]
    for options, message in cases:
        with LLM(case.model, **OPTIONS | options) as llm, pytest.raises(ValueError, match=message):
            run(llm, first)
    with LLM(case.model, **OPTIONS) as llm:
        for method in ("awq", "gptq", "fp8"):
            llm.engine.runner.hf_config.quantization_config = {"quant_method": method}
            with pytest.raises(ValueError, match=rf"lora_request .*the checkpoint is quantised already \({method}\)"):
                run(llm, first)
        del llm.engine.runner.hf_config.quantization_config
        for call in (llm.submit, llm.stream, llm.stream_tokens, llm.add_request, llm.prepare):
            with pytest.raises(TypeError, match="lora_request"):
                call([1], PARAMS, lora_request=first)  # type: ignore[call-arg,operator]
        with pytest.raises(TypeError, match="lora_request"):
            llm.embed([[1]], lora_request=first)  # type: ignore[call-arg]


def test_wrong_adapters_are_refused_before_anything_is_written(case: Case, tmp_path: Path) -> None:
    first = case.requests[0]
    for path in case.adapters[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "adapter_model.safetensors"
    bad = LoRARequest("bad", 3, str(tmp_path))
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(weights)
    alien = {q.replace("layers.0", "layers.7"): tensors[q].clone()}
    alien[q.replace("layers.0", "layers.7").replace("A", "B")] = torch.ones(4, 4)
    embedding = {"base_model.model.model.embed_tokens.weight": torch.ones(500, 64)}
    faults: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"use_dora": True}, {}, "'use_dora' is not supported"),
        ({"modules_to_save": ["embed_tokens"]}, {}, "'modules_to_save' is not supported"),
        ({}, {q: tensors[q][:, :-1].contiguous()}, "the checkpoint's matrix is"),
        ({}, alien, "that are not in the checkpoint"),
        ({}, embedding, "with other values than the checkpoint"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 500)}, "which cannot be merged"),
    ]
    with LLM(case.model, **OPTIONS) as llm:
        for config, changes, message in faults:
            save_file(tensors | changes, weights)
            original = (tmp_path / "adapter_config.json").read_text()
            edit_json(tmp_path / "adapter_config.json", **config)
            with pytest.raises(ValueError, match=message):
                run(llm, [first, bad, None, None, None, None])
            (tmp_path / "adapter_config.json").write_text(original)
        missing = LoRARequest("", 1, str(tmp_path / "nowhere"))
        wrong: list[tuple[Any, str]] = [
            (missing, r"lora_request is '.*nowhere', which has no adapter_config\.json"),
            ([first], "1 lora_requests for 6 prompts; give one for all, or one per prompt"),
            (str(tmp_path), "lora_request is .*; it must be a LoRARequest, None, or a list"),
            ([3] * 6, "lora_request is 3; it must be a LoRARequest, None, or a list"),
        ]
        for given, message in wrong:
            with pytest.raises(ValueError, match=message):
                run(llm, given)
        assert llm.engine.stats()["num_steps"] == 0
        with pytest.raises(ValueError, match="lora_path is ''; it must be a folder with an adapter"):
            LoRARequest("", 1, "")


def test_an_adapter_that_changes_or_cannot_be_read_halfway_is_an_error(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = case.requests
    with LLM(case.model, **OPTIONS) as llm:
        from nanovllm.features.adapters import groups as adapters

        digests = iter(["00" * 16, "11" * 16])
        monkeypatch.setattr(adapters, "digest_adapter", lambda folder: next(digests))
        with pytest.raises(RuntimeError, match=r"the adapter '.*' has changed since its first request was read"):
            run(llm, first)
        monkeypatch.undo()
        assert run(llm, first)
        original = WeightLoad._replace

        def fail_late(self: WeightLoad, path: str) -> None:
            if "layers.1" in path:
                raise MemoryError("none is left")
            original(self, path)

        monkeypatch.setattr(WeightLoad, "_replace", fail_late)
        with pytest.raises(RuntimeError, match="could not be read: none is left; the engine is closed"):
            run(llm, second)
        with pytest.raises(RuntimeError, match="closed"):
            run(llm)


# ---- the checkpoint, other threads, and what goes wrong


def test_a_list_without_an_adapter_is_an_ordinary_call(case: Case) -> None:
    with LLM(case.model, lora=str(case.adapters[0]), **OPTIONS) as llm:
        assert all(map(are_equal, run(llm, [None] * len(PROMPTS)), run_fresh(case, 0)))


def test_an_engine_runs_on_although_its_llm_is_dropped_with_an_adapter(case: Case) -> None:
    """The thread of `submit` keeps the engine, and not the LLM."""
    [expected] = run_fresh(case, None, SEEDED, PROMPTS[:1])
    llm = LLM(case.model, **OPTIONS)
    run(llm, case.requests[0])
    engine = llm.engine
    request = llm.prepare(PROMPTS[0], SEEDED)
    del llm
    [sequence] = [sequence for ended in engine.run([request]) for sequence in ended]
    assert sequence.output_token_ids == expected["token_ids"]
    engine.close()


@pytest.mark.parametrize("when", ["before an adapter", "with an adapter in the weights"])
def test_a_checkpoint_that_changes_on_disk_is_an_error_and_never_a_mixture(when: str, tmp_path: Path) -> None:
    case = save_case(tmp_path, save_random(tmp_path / "model"))
    with LLM(case.model, **OPTIONS) as llm:
        if when == "with an adapter in the weights":
            run(llm, case.requests[0])
        for path in case.model.glob("*.safetensors"):
            save_file(load_file(path), path.with_suffix(".new"), {"format": "pt"})
            path.with_suffix(".new").rename(path)  # the same bytes, but nobody knows that
        message = "the checkpoint .* has changed since it was loaded"
        if when == "before an adapter":
            with pytest.raises(ValueError, match=message):
                run(llm, case.requests[0])
            assert all(map(are_equal, run(llm, None, SEEDED), run_fresh(case, None, SEEDED)))
        else:
            with pytest.raises(RuntimeError, match=f"{message}.*the engine is closed"):
                run(llm)


def test_the_model_is_found_again_from_another_working_folder(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.model.parent)
    with LLM("model", **OPTIONS) as llm:
        run(llm, case.requests[0])
        monkeypatch.chdir("/")
        assert all(map(are_equal, run(llm, None, SEEDED), run_fresh(case, None, SEEDED)))


def test_new_weights_that_come_before_the_run_has_the_engine_refuse_its_adapters(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may load weights between the first check and the beginning of the run."""
    from nanovllm.features.adapters.groups import AdapterOrder

    original = AdapterOrder.list_requests

    def load_first(order: AdapterOrder) -> Any:
        llm._renewal.has_new_weights = True
        return original(order)

    with LLM(case.model, **OPTIONS) as llm:
        monkeypatch.setattr(AdapterOrder, "list_requests", load_first)
        with pytest.raises(ValueError, match=r"load_weights\(\) has replaced those"):
            run(llm, case.requests[0])


def test_an_error_between_the_weights_and_their_name_closes_the_engine(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(case.model, **OPTIONS) as llm:
        run(llm, case.requests[0])
        adapt = Renewal.adapt

        def adapt_and_fail(self: Renewal, *args: Any) -> int:
            adapt(self, *args)
            raise KeyboardInterrupt

        monkeypatch.setattr(Renewal, "adapt", adapt_and_fail)
        with pytest.raises(KeyboardInterrupt):
            run(llm)
        assert llm.engine.closed


def test_a_pipe_in_place_of_a_file_is_refused_at_once(case: Case, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    os.mkfifo(tmp_path / "adapter_config.json")
    with LLM(case.model, **OPTIONS) as llm, pytest.raises(ValueError, match=r"which has no adapter_config\.json"):
        run(llm, LoRARequest("", 1, str(tmp_path)))


def test_a_second_thread_s_object_does_not_take_over_what_the_weights_have(case: Case) -> None:
    """Two threads may make the object that knows this at the same time. One of the two is dropped."""
    from nanovllm.features.adapters.groups import Adapters

    with LLM(case.model, **OPTIONS) as llm:
        run(llm, case.requests[0])
        Adapters(llm.engine)
        assert all(map(are_equal, run(llm, None, SEEDED), run_fresh(case, None, SEEDED)))
