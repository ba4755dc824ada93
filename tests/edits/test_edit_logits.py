"""Masks, biases and penalties: the tokens of transformers' processors and of a plain rule, however they are run."""

import math
import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.distributions import LEAST_P, chi_square_p, exact
from helpers.edit_cases import edit_case
from helpers.graphs import StandInGraphs
from helpers.kernel_cases import pack_values
from helpers.paths import BOX_MODEL
from helpers.tiny import END, SMALL, draw_prompts, edit_json, logits_of, make_tokenizer, save_random
from helpers.warm import WarmPython
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.backends import make_backend
from nanovllm.backends.steps import EAGER
from nanovllm.features.edits.bad_words import BadWord
from nanovllm.features.edits.edit_logits import EditOperators, edit_logits_reference
from nanovllm.features.edits.row_edits import RowEdits
from nanovllm.ops.sample import sample_reference
from nanovllm.runner.step_handle import StepHandle
from nanovllm.text.tokenizer import Tokenizer

TOKENIZER = make_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
EOS = TOKENIZER.token_to_id(END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the byte tokenizer's size, with it."""
    folder = tmp_path_factory.mktemp("speaker")
    save_random(folder, vocab_size=SIZE, eos_token_id=EOS)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token=END)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(open_llm: Callable[..., LLM], folder: Path) -> LLM:
    return open_llm(folder)


PROMPTS = [[i % SIZE for i in prompt] for prompt in draw_prompts([3, 9, 17, 30])]


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def edited(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """The rule, in plain words: vLLM's order."""
    x = logits.clone()
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -math.inf
    for word in params.bad_words or ():
        *begin, last = TOKENIZER.encode(word).ids
        if output[len(output) - len(begin) :] == begin:
            x[last] = -math.inf
    if len(output) < params.min_tokens:
        x[[EOS, *(params.stop_token_ids or ())]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] = x[token] - params.frequency_penalty * count - params.presence_penalty
    return x


def expected(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the tokens of a request that runs alone."""
    output: list[int] = []
    while len(output) < (params.max_tokens or 0):
        x = edited(logits_of(model, prompt + output)[-1], prompt, output, params).unsqueeze(0)
        values = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        table = pack_values(1, params.seed or 0, **values)
        position = torch.tensor([len(prompt) + len(output)])
        output.append(int(sample_reference(x, table, torch.zeros(1, dtype=torch.int32), position).token_ids))
        if output[-1] in (EOS, *(params.stop_token_ids or ())):
            break
    return output


# ---- against transformers


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **options)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("penalty", [0.7, 1.1, 1.8])
def test_repetition_penalty_gives_the_tokens_of_transformers(penalty: float, llm: LLM, model: PreTrainedModel) -> None:
    params = SamplingParams(0, 24, repetition_penalty=penalty)
    found = [generated(model, prompt, repetition_penalty=penalty) for prompt in PROMPTS]
    assert tokens(llm, params) == found
    assert found != tokens(llm, SamplingParams(0, 24))


def test_a_bias_gives_the_tokens_of_transformers(llm: LLM, model: PreTrainedModel) -> None:
    bias = {i: float((i * 37) % 23 - 11) for i in range(0, SIZE, 3)}
    keyed = {(i,): value for i, value in bias.items()}
    params = SamplingParams(0, 24, logit_bias=bias, ignore_eos=True)
    found = [generated(model, prompt, sequence_bias=keyed, eos_token_id=-1) for prompt in PROMPTS]
    assert tokens(llm, params) == found


def test_min_tokens_gives_the_tokens_of_transformers(llm: LLM, model: PreTrainedModel) -> None:
    """The ends are tokens that come early of themselves."""
    first = tokens(llm, SamplingParams(0, 24))
    ends = sorted({output[i] for output in first for i in (2, 5)})
    params = SamplingParams(0, 24, min_tokens=9, stop_token_ids=ends)
    found = [generated(model, p, min_new_tokens=9, eos_token_id=[*ends, EOS], pad_token_id=EOS) for p in PROMPTS]
    assert tokens(llm, params) == found
    assert tokens(llm, replace(params, min_tokens=0)) != found
    assert min(map(len, found)) > 9


def test_bad_words_give_the_tokens_of_transformers(llm: LLM, model: PreTrainedModel) -> None:
    """Pairs and single tokens that come of themselves, as far as they are text."""
    allowed = [i for i in range(SIZE) if TOKENIZER.decode([i]).isascii() and TOKENIZER.decode([i]).isalnum()]
    bias = dict.fromkeys(allowed, 30.0)
    plain = tokens(llm, SamplingParams(0, 24, logit_bias=bias))
    words = [TOKENIZER.decode(output[i : i + n]) for output in plain for i, n in ((2, 2), (7, 1), (11, 3))]
    ids = [TOKENIZER.encode(word).ids for word in words]
    assert {len(i) for i in ids} >= {1, 2, 3}
    keyed = {(i,): value for i, value in bias.items()}
    found = [generated(model, p, bad_words_ids=ids, sequence_bias=keyed) for p in PROMPTS]
    given = tokens(llm, SamplingParams(0, 24, bad_words=words, logit_bias=bias))
    assert given == found != plain
    assert not any(word in TOKENIZER.decode(output) for word in words for output in given)


def test_no_spelling_of_a_bad_word_comes_whatever_its_tokens() -> None:
    """The built-in model's tokenizer has tokens that begin with a space, and " the" is one where "the" is two."""
    tokenizer = Tokenizer(BOX_MODEL)
    size = len(tokenizer.vocabulary)
    rng = random.Random(0)
    for word in ("the", " the", "remotely", "P", "\u2603", "capital of"):
        words = [BadWord(word, tokenizer, size)]
        edits = RowEdits(SamplingParams(bad_words=[word]), words, [], size)
        for _ in range(12):
            # A beginning of the word, in tokens drawn from all that fit, after something else
            text = rng.choice(("", " ")) + word.lstrip()
            output = tokenizer.encode_batch([rng.choice(("", "so", " ", "th", text))])[0]
            (piece,) = tokenizer.encode_batch([text], add_special_tokens=False)
            left = tokenizer.join_tokens(piece)
            while left and rng.random() < 0.8:
                fitting = [i for i in range(1, len(left) + 1) if tokenizer.find_token(left[:i]) is not None]
                count = rng.choice(fitting)
                output = [*output, tokenizer.find_token(left[:count])]
                left = left[count:]
            banned = set()
            for token_id in range(size):
                for first in range(max(0, len(output) - 12), len(output) + 1):
                    said = tokenizer.decode([*output[first:], token_id], skip_special_tokens=False)
                    if said in (word.lstrip(), " " + word.lstrip()):
                        banned.add(token_id)
            mask = np.full((1, -(-size // 32)), -1, np.int32)
            edits.forbid(mask[0], array("i", [5, *output]), len(output))
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
            assert set(np.flatnonzero(allowed == 0).tolist()) == banned, (word, output)


def test_a_word_whose_spaced_form_is_one_token_is_banned_in_a_text() -> None:
    with LLM("tiny-qwen3", max_model_len=64) as llm:
        wanted = dict.fromkeys(llm.tokenizer.encode(" the") + llm.tokenizer.encode("the"), 50.0)
        params = SamplingParams(0, 24, logit_bias=wanted, ignore_eos=True)
        plain, other = llm.generate(["a"] * 2, [params, replace(params, bad_words=["the"])], use_tqdm=False)
        assert " the" in plain.text and "the" not in other.text
        with pytest.raises(ValueError, match="a word of 201 characters; it may have at most 200"):
            llm.generate("a", SamplingParams(bad_words=["a" * 201]))
        for word in ("\ud83d", "the \udc00", "a\ud800b"):
            with pytest.raises(ValueError, match="half of a surrogate pair"):
                llm.generate("a", SamplingParams(bad_words=["the", word]))


# ---- against the rule

EACH: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.9},
    "negative presence": {"presence_penalty": -1.2},
    "frequency": {"frequency_penalty": 1.3},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": dict.fromkeys(range(0, SIZE, 7), 6.0)},
    "allowed": {"allowed_token_ids": list(range(3, SIZE, 5))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, SIZE, 9))},
    "bad words": {"bad_words": ["ab", "c", "de", "fgh"], "allowed_token_ids": TOKENIZER.encode("abcdefgh").ids},
    "all": {
        **{"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": 9},
        **{"stop_token_ids": TOKENIZER.encode("ab").ids, "bad_words": ["cd", "e"], "logit_bias": {100: 4.0, 70: -3.0}},
        "allowed_token_ids": list(range(40, 110)),
    },
}
DRAWN = [SamplingParams(1.0, 20, seed=3 * i + 1, top_p=0.95, **edits) for i, edits in enumerate(EACH.values())]
GREEDY = [replace(params, temperature=0.0) for params in DRAWN]
REQUESTS = [(PROMPTS[i % 4], params) for i, params in enumerate([*DRAWN, SamplingParams(1.0, 20, seed=9), *GREEDY])]


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> list[list[int]]:
    return [expected(model, prompt, params) for prompt, params in REQUESTS]


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "on the C++ kernels": {"attention_backend": "cpu"},
    "in chunks": {"max_num_batched_tokens": 9},
    "preempted": {"num_kvcache_blocks": 8, "max_num_batched_tokens": 19},
    "three at a time": {"max_num_seqs": 3},
    "ranks": {"tensor_parallel_size": 2, "num_kvcache_blocks": 8},
}
DEPTHS = dict.fromkeys(VARIANTS, (1, 2)) | {"ranks": (2,)}


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        pytest.param(options, depth, id=f"{name}-{depth}")
        for name, options in VARIANTS.items()
        for depth in DEPTHS[name]
    ],
)
def test_tokens_are_those_of_the_rule_however_requests_are_run(
    options: dict[str, Any], depth: int, folder: Path, alone: list[list[int]], local_ranks: None
) -> None:
    """Penalties, masks and biases beside each other and beside a row without any; drawn with seeds, and greedy."""
    prompts, params = map(list, zip(*REQUESTS, strict=True))
    with LLM(folder, **{"attention_backend": "torch", **SMALL, **options}) as llm:
        llm.engine.depth = depth
        assert tokens(llm, params, prompts) == alone
        assert (llm.stats()["num_preemptions"] > 0) == (options.get("num_kvcache_blocks") == 8)
        assert not llm.engine.scheduler.edited_rows


@pytest.mark.slow
def test_tokens_are_those_of_the_rule_in_triton(folder: Path, alone: list[list[int]]) -> None:
    pytest.importorskip("triton")
    some = [0, 8, 9, 18]
    with LLM(folder, attention_backend="triton", max_num_batched_tokens=64, **SMALL) as llm:
        params = [replace(REQUESTS[i][1], max_tokens=6, min_tokens=0) for i in some]
        found = tokens(llm, params, [REQUESTS[i][0] for i in some])
    with LLM(folder, attention_backend="torch", **SMALL) as llm:
        assert found == tokens(llm, params, [REQUESTS[i][0] for i in some])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_of_graphs_leaves_its_sampler_out_only_where_logits_are_edited(
    depth: int, folder: Path, alone: list[list[int]]
) -> None:
    prompts, params = map(list, zip(*REQUESTS, strict=True))
    with LLM(folder, attention_backend="torch", **SMALL) as llm:
        runner = llm.engine.runner
        llm.engine.depth = depth
        graphs = runner.steps = StandInGraphs(runner)
        assert tokens(llm, params, prompts) == alone
        between = graphs.parts_run["head"]
        plain = SamplingParams(0, 10, ignore_eos=True)
        tokens(llm, plain)
        assert graphs.parts_run["head"] - between >= 9
        tokens(llm, [*[plain] * 3, replace(plain, presence_penalty=1.0)])
        assert graphs.parts_run["head"] - between < 15
        runner.steps = EAGER


def test_drafts_change_no_token_and_what_depends_on_them_is_not_drafted_for(reciter: Path) -> None:
    """In a step with drafts a sequence has several rows of logits: the edits must find their own."""
    prompts = ["abcdefghijklmnopqrstuvw", "ABCABCABC", "ABCABC", "abcabc"]
    edits: list[dict[str, Any]] = [{"presence_penalty": 0.3}, {}, {"logit_bias": {70: 1.0}}, {"bad_words": ["de"]}]
    params = [SamplingParams(0, 60, ignore_eos=True, **each) for each in edits]
    found = []
    num_drafts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        with LLM(reciter, dtype="float32", max_model_len=128, speculative_config=config) as llm:
            found.append(tokens(llm, params, prompts))  # type: ignore[arg-type]
            num_drafts.append(llm.stats()["num_draft_tokens"])
            tokens(llm, [params[0], params[3]], prompts[:2])  # type: ignore[arg-type]
            assert llm.stats()["num_draft_tokens"] == num_drafts[-1]
    assert found[0] == found[1]
    assert num_drafts[0] == 0 < num_drafts[1]


@pytest.mark.parametrize("name", ["presence", "min_tokens", "bad words"])
def test_a_step_s_model_runs_before_the_tokens_are_read_that_its_sampler_needs(
    name: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At depth 2 a step is read after the next one is launched. Where a mask depends on its tokens, that one's model
    is launched before, and its sampler after."""
    order: list[str] = []

    def note(owner: Any, method: str, word: str) -> None:
        function = getattr(owner, method)

        def noted(*arguments: Any) -> Any:
            result = function(*arguments)
            order.append(word)
            return result

        monkeypatch.setattr(owner, method, noted)

    note(llm.engine.runner, "run_layers", "model")
    note(llm.engine.runner.sampler, "sample", "sample")
    note(StepHandle, "result", "read")
    monkeypatch.setattr(llm.engine, "depth", 2)
    llm.generate([PROMPTS[0]], SamplingParams(0, 14, ignore_eos=True, **EACH[name]), use_tqdm=False)
    each = ["model", "read", "sample"] if name == "bad words" else ["model", "sample", "read"]
    assert order == ["model", "sample", *13 * each, "read"]


# ---- distributions


def test_drawn_tokens_follow_the_edited_distribution(folder: Path, model: PreTrainedModel) -> None:
    """The first token, and the second after the likeliest first: by then the device has counted one."""
    edits = EACH["all"] | {"bad_words": None, "stop_token_ids": None, "min_tokens": 0, "presence_penalty": 1.8}
    params = SamplingParams(1.3, 2, top_k=25, ignore_eos=True, **edits)
    prompt = PROMPTS[1]
    with LLM(folder, **SMALL | {"num_kvcache_blocks": 600}) as llm:
        outputs = llm.generate(prompt, replace(params, n=3000, seed=5), use_tqdm=False)[0].outputs
    firsts = np.array([o.token_ids[0] for o in outputs])
    likeliest = int(np.bincount(firsts).argmax())
    seconds = np.array([o.token_ids[1] for o in outputs if o.token_ids[0] == likeliest])
    for drawn, output in ((firsts, []), (seconds, [likeliest])):
        x = edited(logits_of(model, prompt + output)[-1], prompt, output, params).double().numpy()
        counts = np.bincount(drawn, minlength=SIZE).astype(np.float64)
        assert chi_square_p(counts, exact(x, 1.3, 25)) > LEAST_P


# ---- the kernels


@pytest.mark.parametrize("half", ["both", "masks", "penalties"])
@pytest.mark.parametrize("vocab_size", [37, 500, 9001])
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_a_kernel_edits_as_the_reference_does(name: str, vocab_size: int, half: str) -> None:
    """To the last bit but one: a compiler may fuse a product and a difference."""
    if name == "triton":
        pytest.importorskip("triton")
    logits, edits = edit_case(vocab_size)
    if half == "masks":
        edits = edits._replace(counts=None, penalties=None)
    if half == "penalties":
        edits = edits._replace(masks=None)
    expected = logits.clone()
    given = logits.clone()
    edit_logits_reference(expected, edits)
    make_backend(name).find_operators(EditOperators, "edit_logits").edit_logits(given, edits)
    assert torch.allclose(given, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    untouched = [1, 5]
    assert torch.equal(given[untouched], logits[untouched])


def test_the_reference_is_the_rule_and_broken_logits_stay_broken() -> None:
    logits, edits = edit_case(101)
    given = logits.clone()
    edit_logits_reference(given, edits)
    for i, index in enumerate(edits.indices.tolist()):
        bits = np.unpackbits(edits.masks[i].numpy().view(np.uint8), bitorder="little")  # type: ignore[union-attr]
        repetition, frequency, presence = edits.penalties[i].tolist()  # type: ignore[index]
        for token in range(101):
            x = float(logits[index, token])
            count = int(edits.counts[edits.rows[i], token])  # type: ignore[index]
            if not bits[token] and x < math.inf:
                x = -math.inf
            if count:
                x = x / repetition if x > 0 else x * repetition
            x -= frequency * (count // 2) + presence * (count >= 2)
            assert float(given[index, token]) == pytest.approx(x, rel=1e-5, nan_ok=True)


def test_a_bad_word_beyond_the_vocabulary_cannot_come_and_does_no_harm() -> None:
    with LLM("tiny-qwen3", max_model_len=64) as llm:
        llm.tokenizer.add_tokens([f"<added {i}>" for i in range(64)])
        assert llm.tokenizer.encode("<added 63>")[0] >= llm.engine.config.vocab_size
        words = ["<added 63>", "France<added 63>"]
        params = [SamplingParams(0, 8), SamplingParams(0, 8, bad_words=words)]
        plain, asked = llm.generate(["The capital of France is"] * 2, params, use_tqdm=False)
        assert plain["token_ids"] == asked["token_ids"]


@pytest.mark.parametrize("edits", [{"logit_bias": {7: 1e300}}, {"repetition_penalty": 1e-300}])
def test_values_beyond_float32_do_what_large_ones_do(edits: dict[str, Any], llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(0, 4, **edits), use_tqdm=False)
    assert output["finish_reason"] == "length"


def test_a_row_of_which_nothing_is_left_ends_with_an_error_and_the_others_go_on(llm: LLM) -> None:
    nothing = SamplingParams(0, 5, allowed_token_ids=[EOS], min_tokens=3)
    bad, good = llm.generate(PROMPTS[:2], [nothing, SamplingParams(0, 5)], use_tqdm=False)
    assert (bad["finish_reason"], bad["token_ids"]) == ("error", [])
    assert good["finish_reason"] == "length"


def test_rows_beside_an_edited_one_keep_their_tokens_in_bfloat16(folder: Path) -> None:
    """Such a step samples from float32: of logits that were bfloat16, the same."""
    plain = [SamplingParams(1.5, 20, seed=i, top_k=50 * i, top_p=0.9) for i in range(4)]
    with LLM(folder, **SMALL | {"dtype": "bfloat16", "attention_backend": "cpu"}) as llm:
        before = tokens(llm, plain)
        after = tokens(llm, [*plain, SamplingParams(1.0, 20, seed=7, **EACH["all"])], [*PROMPTS, PROMPTS[0]])
    assert after[:4] == before


def test_a_request_that_has_run_holds_no_masks(llm: LLM) -> None:
    """They are as large as the vocabulary, and `generate` holds all its requests to the end."""
    request = llm.prepare(PROMPTS[0], SamplingParams(max_tokens=3, min_tokens=2, allowed_token_ids=[1, 2, 3], n=2))
    before = set(vars(request.edits))
    ((_, output),) = llm.stream([request])
    assert {*output["outputs"][0]["token_ids"], *output["outputs"][1]["token_ids"]} <= {1, 2, 3}
    assert set(vars(request.edits)) == before


def test_an_engine_of_which_nobody_asks_for_edits_loads_nothing_of_them(folder: Path, warm_python: WarmPython) -> None:
    code = (
        "import sys; from nanovllm import LLM, SamplingParams\n"
        f"LLM({str(folder)!r}, max_model_len=64).generate([[5]], SamplingParams(1.0, 3), use_tqdm=False)\n"
        "print([name for name in sys.modules if 'edit' in name and 'nanovllm' in name])"
    )
    done = warm_python.run(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# ---- what comes back


def test_logprobs_are_of_the_distribution_before_edits(llm: LLM, model: PreTrainedModel) -> None:
    params = SamplingParams(0, 12, logprobs=0, **EACH["all"])
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    raw = logits_of(model, PROMPTS[1] + output["token_ids"]).log_softmax(-1)[len(PROMPTS[1]) - 1 : -1]
    for token, given, row in zip(output["token_ids"], output["logprobs"], raw, strict=True):
        assert given[token] == pytest.approx(float(row[token]), abs=1e-4)


def test_a_models_own_repetition_penalty_is_the_default(folder: Path, tmp_path: Path, llm: LLM) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "generation_config.json", do_sample=False, repetition_penalty=1.4)
    with LLM(tmp_path, **SMALL) as other:
        assert other.get_default_sampling_params() == SamplingParams(0, repetition_penalty=1.4)
        default = [output["token_ids"] for output in other.generate(PROMPTS, use_tqdm=False)]
    assert default == tokens(llm, SamplingParams(0, repetition_penalty=1.4))


FORBIDDEN = {
    "bad_words_ids": {"bad_words_ids": True},
    "suppress_tokens": {"suppress_tokens": True},
    "min_new_tokens": {"min_new_tokens": 20},
    "all": {"bad_words_ids": True, "suppress_tokens": True, "min_new_tokens": 20},
}


def cut(tokens: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first end."""
    first = min((tokens.index(end) for end in ends if end in tokens), default=len(tokens))
    return tokens[: first + 1]


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[list[int]]:
    """The tokens that transformers generates without edits."""
    return [generated(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_generation_config_forbids_is_what_transformers_forbids(
    name: str, plain: list[list[int]], folder: Path, tmp_path: Path, model: PreTrainedModel
) -> None:
    """Words of one to three tokens that the model would say; one begins in the prompt, and some end a sequence."""
    ends = [plain[0][2], EOS]  # the first one would come soon
    pairs = [[PROMPTS[1][-1], plain[1][0]], plain[1][4:6], plain[2][5:8], [plain[3][4]], [EOS], [plain[0][2]]]
    values = {"bad_words_ids": pairs, "suppress_tokens": [plain[2][1], plain[3][0]]}
    asked = {key: values.get(key, value) for key, value in FORBIDDEN[name].items()}
    expected = [generated(model, prompt, eos_token_id=ends, **asked) for prompt in PROMPTS]
    assert expected != [cut(tokens, ends) for tokens in plain]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "generation_config.json", do_sample=False, max_new_tokens=24, eos_token_id=ends, **asked)
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        with LLM(tmp_path, **SMALL, speculative_config=drafts) as other:
            assert [output["token_ids"] for output in other.generate(PROMPTS, use_tqdm=False)] == expected
            alone = [other.generate(prompt, use_tqdm=False)[0]["token_ids"] for prompt in PROMPTS]
        assert alone == expected


def test_the_sampling_of_a_request_that_is_refused_is_named(llm: LLM, random_model: Path) -> None:
    for edits, message in (
        ({"allowed_token_ids": [SIZE]}, rf"allowed_token_ids has {SIZE}; the vocabulary is 0..{SIZE - 1}"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias has -1"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate([[1]], SamplingParams(0, **edits))
    for word in ([SIZE], [1, -1]):
        with pytest.raises(ValueError, match=rf"bad_words has {word[-1]}; the vocabulary is 0..{SIZE - 1}"):
            llm.generate([[1]], SamplingParams(0, bad_words=[word]))
    with LLM(random_model, **SMALL) as without, pytest.raises(ValueError, match="bad_words need a tokenizer"):
        without.generate([[1]], SamplingParams(0, bad_words=["a"]))
