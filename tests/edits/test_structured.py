"""Constrained output: it ends, it fits, and nothing else about a request changes."""

import json
import logging
import random
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.schemas import BAD_VALUES, SCHEMAS, record, text, whole
from helpers.tiny import edit_json, logits_of, make_tokenizer, save_random
from helpers.warm import WarmPython

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

import jsonschema
from pydantic import BaseModel

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.config import EngineConfig
from nanovllm.features.edits import compiler, grammars
from nanovllm.features.edits.grammars import Grammars
from nanovllm.outputs import Output

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "max_num_seqs": 64}
EOS = 663
PROMPTS = ["the cat", "what is 3 + 4?", "once upon a time there was", "sort: c a b"]


def fits(schema: dict[str, Any], value: str) -> None:
    """Fail unless value is JSON of the schema, formats included."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(value))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-qwen3", kvcache_memory_bytes=64 << 20, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes, "xy", "xyz" and an end of sequence."""
    folder = tmp_path_factory.mktemp("spelling")
    tokenizer = make_tokenizer()
    save_random(folder, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>")
    return folder


def complete(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: list[str] = PROMPTS) -> list[Output]:
    return llm.generate(prompts, params, use_tqdm=False)


# ---- It fits


@pytest.mark.parametrize("name", BAD_VALUES)
def test_the_format_checker_refuses_a_bad_value(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        fits({"type": "string", "format": name}, json.dumps(BAD_VALUES[name]))


@pytest.mark.parametrize(
    ("load_format", "temperature"), [("auto", 1.5), pytest.param("dummy", 0.0, marks=pytest.mark.slow)]
)
def test_sixty_schemas_and_four_grammars_end_and_fit_in_one_batch(load_format: str, temperature: float) -> None:
    assert len(SCHEMAS) == 60
    others: list[dict[str, Any]] = [{"choice": ["yes", "no"]}, {"regex": "[0-9]{3}"}, {"grammar": 'start: "a"~2..4'}]
    wanted = [{"json": schema} for schema in SCHEMAS.values()] + [*others, {"choice": ["naïve", "nai", "😀"]}]
    params = [SamplingParams(temperature, 900, seed=i, structured_outputs=one) for i, one in enumerate(wanted)]
    with LLM("tiny-qwen3", load_format=load_format, kvcache_memory_bytes=256 << 20, **OPTIONS) as llm:
        outputs = llm.generate([f"item {i}:" for i in range(64)], params, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["stop"] * 64
    for schema, output in zip(SCHEMAS.values(), outputs, strict=False):
        fits(schema, output.text)
    yes, digits, many, unicode = (output.text for output in outputs[60:])
    assert yes in ("yes", "no") and len(digits) == 3 and digits.isdecimal()
    assert many in ("aa", "aaa", "aaaa") and unicode in ("naïve", "nai", "😀")


def test_dates_that_do_not_exist_are_masked(llm: LLM) -> None:
    compiled = grammars_of(llm)
    for name, bad, good in (
        ("date", ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"], ["2024-02-29", "2000-02-29", "0001-01-31"]),
        ("time", ["23:59:60Z", "10:00:00z", "10:00:00"], ["23:59:59Z", "00:00:00.25+01:00"]),
        (
            "date-time",
            ["2023-02-29T10:00:00Z", "2016-12-31T23:59:60Z", "2024-02-29t10:00:00Z", "2024-02-29T10:00:00z"],
            ["2024-02-29T10:00:00.1Z", "2024-02-29T23:59:59-23:59"],
        ),
    ):
        start = compiled.compile(StructuredOutputsParams(json={"type": "string", "format": name}))
        for value, is_good in [(value, False) for value in bad] + [(value, True) for value in good]:
            matcher = start.deep_copy()
            assert matcher.consume_tokens(llm.tokenizer.encode(f'"{value}"')) is is_good, value


def grammars_of(llm: LLM) -> Grammars:
    llm.prepare("x", SamplingParams(structured_outputs={"json_object": True}))
    assert llm.engine.editor.grammars is not None
    return llm.engine.editor.grammars


class City(BaseModel):
    name: str
    population: int | None


def test_a_pydantic_class_a_dict_and_a_text_of_its_schema_are_the_same(llm: LLM) -> None:
    schema = City.model_json_schema()
    given = [City, schema, json.dumps(schema)]
    params = [SamplingParams(0.7, 40, seed=1, structured_outputs={"json": one}) for one in given]
    texts = {output.text for output in complete(llm, params, ["a city:"] * 3)}
    assert len(texts) == 1
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json=City)).structured_outputs == (
        StructuredOutputsParams(json=schema)
    )


def test_what_is_assigned_to_structured_outputs_is_checked_by_each_request(llm: LLM) -> None:
    asked = StructuredOutputsParams(regex="a+")
    params = SamplingParams(max_tokens=4, structured_outputs=asked)
    asked.regex = ""
    with pytest.raises(ValueError, match=r"structured_outputs\.regex is ''"):
        SamplingParams(structured_outputs=asked)
    assert params.clone().structured_outputs == StructuredOutputsParams(regex="a+"), "it has a copy of its own"
    params.structured_outputs.choice = ["b"]
    with pytest.raises(ValueError, match="structured_outputs has regex and choice"):
        llm.generate("x", params, use_tqdm=False)


def test_choices_come_as_often_as_their_paths_renormalised_under_the_masks_say(tiny: Path) -> None:
    """P(choice) is summed over all ways to spell it; a chi-square test at 1 in 1000."""
    tokenizer = make_tokenizer()
    prompt = [70, 71, 72]
    temperature = 8.0
    count = 2000
    choices = ["a", "ab", "xyz", "xyb"]
    end = tokenizer.token_to_id("<|end|>")
    spelled = {
        token: i for token, i in tokenizer.get_vocab().items() if token in {"a", "b", "x", "y", "z", "xy", "xyz"}
    }
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(tiny)
    expected: Counter[str] = Counter()

    def walk(said: str, token_ids: list[int], probability: float) -> None:
        allowed = {i: said + token for token, i in spelled.items() if any(c.startswith(said + token) for c in choices)}
        if not allowed:  # nothing goes on: it ends without an end of sequence
            expected[said] += probability
            return
        if said in choices:
            allowed[end] = said
        logits = logits_of(model, prompt + token_ids)[-1] / temperature
        weights = torch.softmax(logits[list(allowed)].double(), 0).tolist()
        for (token_id, now), weight in zip(allowed.items(), weights, strict=True):
            if token_id == end:
                expected[said] += probability * weight
            else:
                walk(now, [*token_ids, token_id], probability * weight)

    with torch.inference_mode():
        walk("", [], 1.0)
    assert min(expected.values()) * count > 5 and abs(sum(expected.values()) - 1) < 1e-9
    params = [SamplingParams(temperature, 8, seed=i, structured_outputs={"choice": choices}) for i in range(count)]
    with LLM(tiny, dtype="float32", max_model_len=64, max_num_seqs=512) as llm:
        found = Counter(output.text for output in llm.generate([prompt] * count, params, use_tqdm=False))
    assert found.keys() == expected.keys()
    statistic = sum((found[c] - count * p) ** 2 / (count * p) for c, p in expected.items())
    assert statistic < 16.27, (found, expected)  # 3 degrees of freedom


class Everything:
    """A grammar that everything fits."""

    def deep_copy(self) -> "Everything":
        return self

    def consume_token(self, token_id: int) -> bool:
        return True

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_everything_changes_no_token(
    backend: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammars, "compile", lambda self, params: Everything())
    monkeypatch.setattr(grammars, "fill_masks", lambda masks, places: None)
    free = SamplingParams(temperature, 40, seed=4, top_p=0.9)
    bound = SamplingParams(temperature, 40, seed=4, top_p=0.9, structured_outputs={"json_object": True})
    with LLM("tiny-qwen3", attention_backend=backend, kvcache_memory_bytes=32 << 20, **OPTIONS) as llm:
        assert [o.token_ids for o in complete(llm, bound)] == [o.token_ids for o in complete(llm, free)]


# ---- It ends


def test_it_ends_with_its_grammar_and_with_an_end_of_sequence_only_where_nothing_else_can_end_it(llm: LLM) -> None:
    wanted = [{"json": record(a=whole(0, 99))}, {"choice": ["no"]}, {"regex": "[0-9]+"}, {"json": {"type": "integer"}}]
    params = [SamplingParams(0, 200, structured_outputs=one) for one in wanted]
    outputs = complete(llm, params)
    assert [output.finish_reason for output in outputs] == ["stop"] * 4
    assert [output.token_ids[-1] == EOS for output in outputs] == [False, False, True, True]
    assert all(output.stop_reason is None for output in outputs)
    assert json.loads(outputs[0].text)["a"] >= 0 and outputs[2].text.isdecimal()


def test_what_is_cut_says_so(llm: LLM) -> None:
    (output,) = complete(llm, SamplingParams(0, 3, structured_outputs={"regex": "[a-z]{40}"}), ["the"])
    assert output.finish_reason == "length" and len(output.token_ids) == 3


def test_a_stop_string_and_a_stop_token_end_it_as_they_end_any_output(llm: LLM) -> None:
    comma = llm.tokenizer.encode(",")[0]
    wanted = {"regex": "[a-z]{2},[a-z]{9}"}
    by_text, by_token = complete(
        llm,
        [
            SamplingParams(0, stop=",", structured_outputs=wanted),
            SamplingParams(
                0,
                stop_token_ids=[comma],
                structured_outputs={
                    "regex": "[a-z],[a-z]{9}",
                },
            ),
        ],
        ["the"] * 2,
    )
    assert by_text.stop_reason == "," and len(by_text.text) == 2
    assert by_token.stop_reason == comma and len(by_token.text) == 1
    (whole_text,) = complete(llm, SamplingParams(0, stop="!", structured_outputs=wanted), ["the"])
    assert len(whole_text.text) == 12 and whole_text.stop_reason is None


def test_a_matcher_that_fails_ends_its_request_with_an_error_and_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Everything):
        left = 3

        def deep_copy(self) -> "Failing":
            return Failing()

        def consume_token(self, token_id: int) -> bool:
            self.left -= 1
            return self.left >= 0

        def get_error(self) -> str:
            return "too complex" if self.left < 0 else ""

    good = SamplingParams(0, 40, structured_outputs={"regex": "[a-z]{5}"})
    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "compile", lambda self, params: Failing())
        failing = llm.prepare("the cat", SamplingParams(0, 40, structured_outputs={"json_object": True}))
        patch.setattr(grammars, "fill_masks", lambda masks, places: None)
        outputs = dict(llm.stream([failing, llm.prepare("the cat", SamplingParams(0, 9))]))
    assert outputs[0].finish_reason == "error" and len(outputs[0].token_ids) == 3
    assert "after 3 tokens of output: too complex" in str(outputs[0].error)
    assert outputs[1].finish_reason == "length" and outputs[1].error is None
    (after,) = complete(llm, good, ["the cat"])
    assert len(after.text) == 5


def test_a_matcher_that_runs_into_its_limit_while_a_mask_is_made_does_not_pass_for_an_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance then lets an end of sequence through."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(compiler, "LIMITS", LLParserLimits(step_lexer_fuel=300, verbose_errors=False))
    hard = r"x{1,3}((a|b|c|d|é|😀)*[a-z]{1,40}(q|w|e|r)+){1,30}"
    (output,) = complete(llm, SamplingParams(0, 60, structured_outputs={"regex": hard}), ["the"])
    assert output.finish_reason == "error" and "too many expressions" in str(output.error), output


# ---- It is refused


def test_a_grammar_is_compiled_once_however_many_requests_share_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    compile_ = grammars.compile_grammar
    monkeypatch.setattr(grammars, "compile_grammar", lambda *args: compiled.append(args[2]) or compile_(*args))
    schema = record(once=whole(0, 9))
    for _ in range(500):
        llm.prepare("x", SamplingParams(structured_outputs={"json": {**schema}}))
    assert compiled == [schema]
    for i in range(grammars.MOST_KEPT + 10):
        llm.prepare("x", SamplingParams(structured_outputs={"regex": f"a{i}"}))
    assert grammars_of(llm).find.cache_info().currsize == grammars.MOST_KEPT


def test_what_a_model_cannot_do_is_refused_before_anything_runs(
    llm: LLM, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"regex": "a"}
    with pytest.raises(ValueError, match=r"ignore_eos is True.*structured_outputs"):
        SamplingParams(ignore_eos=True, structured_outputs=asked)
    with pytest.raises(ValueError, match=r"prompt 1: structured_outputs\.json: at #/items: .*uniqueItems"):
        bad = {"json": {"type": "array", "items": {"uniqueItems": True}}}
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=bad)], use_tqdm=False)
    with LLM(random_model, max_model_len=64) as bare, pytest.raises(ValueError, match="needs a tokenizer"):
        bare.generate([[1, 2]], SamplingParams(structured_outputs=asked))
    monkeypatch.delitem(sys.modules, "nanovllm.features.edits.grammars")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with (
        LLM("tiny-qwen3", **OPTIONS, num_kvcache_blocks=16) as llm,
        pytest.raises(ValueError, match=r"pip install llguidance"),
    ):
        llm.generate("a", SamplingParams(structured_outputs=asked))


def test_nothing_of_it_is_imported_before_a_request_asks(warm_python: WarmPython) -> None:
    script = (
        "import sys, nanovllm; llm = nanovllm.LLM('tiny-qwen3', max_model_len=64, num_kvcache_blocks=4); "
        "llm.generate('a', nanovllm.SamplingParams(max_tokens=2), use_tqdm=False); "
        "print([n for n in sys.modules if 'llguidance' in n or 'grammars' in n or 'json_schema' in n])"
    )
    assert warm_python.run(script).stdout.strip() == "[]"


# ---- Nothing else changes


def mixed(temperature: float = 0.8) -> list[SamplingParams]:
    """Requests of every kind, constrained and not."""
    wanted: list[dict[str, Any] | None] = [
        {"json": record(name=text(12), tags={"type": "array", "items": text(5), "maxItems": 3}, size=whole(0, 500))},
        None,
        {"regex": "[a-z ]{30,60}\\."},
        {"choice": ["a cat", "a dog", "a doge"]},
        None,
        {"json_object": True},
    ]
    return [SamplingParams(temperature, 60, seed=i, structured_outputs=wanted[i % 6], logprobs=2) for i in range(18)]


MANY = [f"{prompt} {'and then ' * (5 * i)}" for i in range(6) for prompt in PROMPTS[:3]]


@pytest.fixture(scope="module")
def plain() -> list[Output]:
    """The outputs of the requests of `mixed`, one at a time, without a prefix cache."""
    with LLM("tiny-qwen3", kvcache_memory_bytes=64 << 20, enable_prefix_caching=False, **OPTIONS) as llm:
        return [llm.generate(p, params, use_tqdm=False)[0] for p, params in zip(MANY, mixed(), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kvcache_memory_bytes": 64 << 20},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 32, "max_model_len": 512, "max_num_batched_tokens": 48},
        {"attention_backend": "cpu", "kvcache_memory_bytes": 64 << 20},
        pytest.param({"tensor_parallel_size": 2, "kvcache_memory_bytes": 64 << 20}, id="two ranks"),
    ],
)
def test_seeded_requests_give_the_same_through_preemption_chunks_cache_backends_and_ranks(
    options: dict[str, Any], plain: list[Output], local_ranks: None
) -> None:
    """At depth 2 steps are launched ahead, as on a GPU: a grammar's masks are made when the step's model runs already.

    They are never too late.
    """
    with LLM("tiny-qwen3", **OPTIONS | options) as llm:
        for depth in (1, 2):
            llm.engine.depth = depth
            llm.reset_prefix_cache()
            before = llm.stats()["num_preemptions"]
            outputs = llm.generate(MANY, mixed(), use_tqdm=False)
            assert (llm.stats()["num_preemptions"] > before) == ("num_kvcache_blocks" in options)
            assert [(o.text, o.finish_reason) for o in outputs] == [(o.text, o.finish_reason) for o in plain]
            assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
            for output, alone in zip(outputs, plain, strict=True):
                for mine, others in zip(output.logprobs or [], alone.logprobs or [], strict=True):
                    assert mine == pytest.approx(others, abs=1e-3)


def test_logprobs_are_of_the_raw_distribution(llm: LLM) -> None:
    (free,) = complete(llm, SamplingParams(0, 1, logprobs=3), ["the cat"])
    (bound,) = complete(llm, SamplingParams(0, 1, logprobs=3, structured_outputs={"regex": "[0-9]"}), ["the cat"])
    assert free.logprobs and bound.logprobs
    likeliest = sorted(free.logprobs[0].items(), key=lambda item: -item[1])[:3]
    assert {i: bound.logprobs[0][i] for i, _ in likeliest} == pytest.approx(dict(likeliest), abs=1e-4)
    assert bound.logprobs[0][bound.token_ids[0]] <= likeliest[-1][1]


def test_each_completion_of_a_prompt_fits(llm: LLM) -> None:
    schema = record(a=whole(0, 9), b=text(4))
    (output,) = complete(llm, SamplingParams(1.5, 100, n=5, seed=1, structured_outputs={"json": schema}), ["x"])
    assert len({completion.text for completion in output.outputs}) > 1
    for completion in output.outputs:
        fits(schema, completion.text)


class Oracle:
    """Drafts what is known to come, or something else."""

    def __init__(self, outputs: list[Output]) -> None:
        self._known = {tuple(o.prompt_token_ids): o.token_ids for o in outputs}
        self._rng = random.Random(0)

    def offer(self, seqs: list[Any], most: np.ndarray) -> np.ndarray:
        return most

    def write_drafts(self, batch: Any) -> None:
        for seq, tokens in batch.shares():
            coming = self._known[tuple(seq.prompt_token_ids)][len(seq.output_token_ids) :]
            for i in range(1, len(tokens)):
                is_right = i <= len(coming) and self._rng.random() < 0.8
                tokens[i] = coming[i - 1] if is_right else self._rng.choice([EOS, self._rng.randrange(EOS)])

    def note_end(self, seq: Any) -> None:
        pass


def test_drafts_are_masked_one_by_one_and_change_no_token(llm: LLM) -> None:
    from nanovllm.features.drafts.costs import StepCosts
    from nanovllm.features.drafts.speculation import Speculation

    costless = StepCosts(np.array([1.0, 99.0]), np.ones(2), np.ones(2), np.zeros(2))
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    expected = complete(llm, mixed(), MANY)
    with LLM("tiny-qwen3", kvcache_memory_bytes=64 << 20, speculative_config=drafts, **OPTIONS) as drafting:
        scheduler = drafting.engine.scheduler
        scheduler.speculation = Speculation(scheduler, Oracle(expected), 4, costless)
        outputs = complete(drafting, mixed(), MANY)
        stats = drafting.stats()
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > stats["num_generated_tokens"] / 2
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [(o.token_ids, o.finish_reason) for o in expected]


def test_what_forbids_tokens_besides_a_grammar_is_kept_with_drafts_too(llm: LLM) -> None:
    from nanovllm.features.drafts.costs import StepCosts
    from nanovllm.features.drafts.speculation import Speculation

    asked = {"regex": "[a-z ]{40}"}
    space = llm.tokenizer.encode(" ")[0]
    params = [
        SamplingParams(0, 60, structured_outputs=asked, bad_words=["the", "a"]),
        SamplingParams(0, 60, structured_outputs=asked, logit_bias={space: -50.0}),
        SamplingParams(0, 60, structured_outputs=asked, repetition_penalty=1.5),
        SamplingParams(0, 60, structured_outputs={"regex": "[a-z]*"}, min_tokens=12),
    ]
    alone = complete(llm, params)
    costless = StepCosts(np.array([1.0, 99.0]), np.ones(2), np.ones(2), np.zeros(2))
    with LLM(
        "tiny-qwen3",
        kvcache_memory_bytes=64 << 20,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        **OPTIONS,
    ) as drafting:
        scheduler = drafting.engine.scheduler
        scheduler.speculation = Speculation(scheduler, Oracle(alone), 3, costless)
        outputs = complete(drafting, params)
        assert drafting.stats()["num_accepted_tokens"] > 20
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert all(len(o.text) == 40 for o in outputs[:3]) and len(outputs[3].token_ids) >= 12


# ---- jobs


def test_a_jobs_lines_are_constrained_as_openai_and_vllm_write_it_and_cut_ones_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from helpers.batch_jobs import openai_line, read_answers, texts_by_id, write_lines

    from nanovllm.apps.jobs.job import Job, Status
    from nanovllm.apps.jobs.run import run_job

    caplog.set_level(logging.INFO, "nanovllm")
    schema = record(a=whole(0, 9), b=text(3))
    compiled: list[str] = []
    compile_ = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, *key: compiled.append(key[0]) or compile_(self, *key))

    def chat(custom_id: str, **body: Any) -> dict[str, Any]:
        return openai_line(custom_id, messages=[{"role": "user", "content": custom_id}], **body)

    def response_format_with(**more: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}

    fitting = [
        chat(f"s{i}", response_format=response_format_with(strict=bool(i % 2)), max_tokens=90) for i in range(20)
    ]
    lines = [
        *fitting,
        chat("absent", response_format=response_format_with(), max_tokens=90),
        chat("own", structured_outputs={"json": schema}, max_tokens=90),
        openai_line("choice", prompt="a", structured_outputs={"choice": ["yes", "no"]}),
        chat("cut", response_format={"type": "json_object"}, max_tokens=2),
        chat("long", response_format={"type": "text"}, max_tokens=2),
        chat("bad", response_format=response_format_with(schema={"items": {"not": {}}})),
    ]
    source = write_lines(tmp_path / "in", lines)
    output = tmp_path / "out"
    config = EngineConfig("tiny-qwen3", kvcache_memory_bytes=64 << 20, **OPTIONS)
    assert run_job(Job(str(source), str(output), config, model_name="tiny-qwen3")) == Status.LINES_FAILED
    answers = {answer["custom_id"]: answer for answer in read_answers(output)}
    texts = texts_by_id(output)
    for custom_id in [line["custom_id"] for line in fitting] + ["absent", "own"]:
        fits(schema, texts[custom_id])
    assert texts["choice"] in ("yes", "no")
    assert answers["cut"]["response"]["status_code"] == 200
    assert answers["cut"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert answers["bad"]["response"]["status_code"] == 400
    assert "structured_outputs.json: at #/items: " in answers["bad"]["error"]["message"]
    assert sorted(compiled) == ["choice", "json", "json", "json_object"], "the bad one, and one for 22 lines"
    assert "25 results, 1 errors; 1 constrained outputs were cut at their token limit and may not parse" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format is"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format is"),
        ({"response_format": "json_object"}, "response_format is 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format is"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema is None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stric": True}}},
            "'stric'.*'strict'",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "give one"),
        ({"structured_outputs": ["a"]}, r"structured_outputs is \['a'\]"),
        ({"structured_outputs": {}}, "has none of"),
        ({"structured_outputs": {"json": {}, "structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos is True"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "look-ahead"),
    ],
)
def test_a_line_that_asks_for_it_wrongly_is_an_error(llm: LLM, body: dict[str, Any], words: str) -> None:
    from nanovllm.apps.jobs.request_lines import LineError, prepare_request, read_request_line
    from nanovllm.apps.jobs.source import Line

    line = json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode()
    with pytest.raises(LineError, match=words):
        prepare_request(read_request_line(Line(1, line)), llm, "tiny-qwen3")


@pytest.mark.slow
def test_the_example_makes_records(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / "extract.py"
    monkeypatch.setattr(sys, "argv", [str(path), "tiny-qwen3", "3"])
    runpy.run_path(str(path), run_name="__main__")
    assert "with the schema: 3 of 3 answers are records, 3 bare" in capsys.readouterr().out


GBNF = """root ::= select " from " table
select ::= "SELECT " column
column ::= "col_1" | "col_2"
table ::= "table_" [12]  # as in vLLM's example
"""


def test_a_grammar_in_gbnf_is_one_in_lark(tiny: Path) -> None:
    lark = 'start: "SELECT " COLUMN " from table_" /[12]/\nCOLUMN: "col_1" | "col_2"'
    with LLM(tiny, **OPTIONS) as llm:
        texts = [
            llm.generate([[5]] * 4, [constrained({"grammar": text}, seed) for seed in range(4)], use_tqdm=False)
            for text in (GBNF, lark)
        ]
    assert [output.token_ids for output in texts[0]] == [output.token_ids for output in texts[1]]
    assert all(re.fullmatch("SELECT col_[12] from table_[12]", output.text) for output in texts[0])


def constrained(form: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=64, structured_outputs=form, seed=seed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a', "no grammar in GBNF: Unexpected end of input"),
        ("root ::= other", "no grammar in GBNF: Rule 'other' not found"),
        ("root ::= " + 5000 * "(", "no grammar in GBNF"),
        ("root ::= " + 20_000 * '"a"', "it may have 32768: use Lark"),
    ],
)
def test_a_bad_grammar_in_gbnf_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compiler.read_grammar("grammar", text)
