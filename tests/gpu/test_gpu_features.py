"""Everything that an engine can do, on a real GPU: in float32 our kernels' tokens are those of the torch backend there.

`python -m pytest -m gpu tests/gpu/test_gpu_features.py`
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.fakes_drafts import FREE
from helpers.hybrids import save_hybrid, save_sparse_hybrid
from helpers.tiny import draw_prompts, save_random, save_reciter
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from nanovllm.features.drafts.speculation import Speculation
from nanovllm.outputs import Output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]

TOLERANCES = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.8}
"""By how much log-probabilities may differ: the logits of these models lie between -60 and 60."""
ROUNDS_INPUTS = ("w8a8",)
"""Values of `quantization` with which products round their inputs."""

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 48,  # room for three of the longest sequences: some are preempted
}
PROMPTS = draw_prompts([1, 5, 17, 100, 40, 33, 64, 3, 90, 12])
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=9)


def serve(
    model: Path | str, backend: str, params: Any = GREEDY, prompts: Any = PROMPTS, **options: Any
) -> list[Output]:
    with LLM(model, **OPTIONS | {"attention_backend": backend} | options) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: Seq[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_same_tokens(outputs: Seq[Output], expected: Seq[Output]) -> None:
    """Fail unless float32's greedy tokens are the same, and their log-probabilities nearly so."""
    assert tokens(outputs) == tokens(expected)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.logprobs is not None and reference.logprobs is not None
        for token_id, values, wanted in zip(output.token_ids, output.logprobs, reference.logprobs, strict=True):
            assert values[token_id] == pytest.approx(wanted[token_id], abs=TOLERANCES["float32"])


def measure_rounding(outputs: Seq[Output], exact: Seq[Output]) -> tuple[int, float]:
    """Return how many tokens precede the first other token of their sequence, and the median error of their
    log-probabilities."""
    errors = []
    for output, reference in zip(outputs, exact, strict=True):
        assert output.logprobs is not None and reference.logprobs is not None
        pairs = zip(output.token_ids, reference.token_ids, strict=True)
        for (got, wanted), values, wanted_values in zip(pairs, output.logprobs, reference.logprobs, strict=True):
            if got != wanted:
                break
            errors.append(abs(values[got] - wanted_values[got]))
    assert errors
    return len(errors), sorted(errors)[len(errors) // 2]


def check_tokens(model: Path, dtype: str, only_ours: dict[str, Any] | None = None, **options: Any) -> None:
    """Compare our kernels with the torch backend: in float32 their tokens are the same.

    Args:
        only_ours: options of the engine with our kernels alone.
    """
    found = serve(model, "triton", dtype=dtype, **options | (only_ours or {}))
    expected = serve(model, "torch", dtype=dtype, **options)
    if dtype == "float32" and options.get("quantization") not in ROUNDS_INPUTS:
        assert_same_tokens(found, expected)
    else:
        assert_equally_rounded(found, expected, model, **options)


def assert_equally_rounded(found: Seq[Output], expected: Seq[Output], model: Path, **options: Any) -> None:
    """Fail unless our kernels round about as torch does, where both round.

    In 16 bits, and where a product rounds its inputs, the last bits of a sum may choose another code, another token or
    another expert, and all that follows differs. So both are compared with float32, and products of exact inputs. The
    kernels agree with it for more than half as many tokens as torch does, and their median error is less than twice
    torch's. Torch must agree for more than 5 % of all tokens: else it says nothing.
    """
    if options.get("quantization") in ROUNDS_INPUTS:
        options["quantization"] = "int8"
    exact = serve(model, "torch", **options | {"dtype": "float32"})
    agreed, error = measure_rounding(found, exact)
    torch_agreed, torch_error = measure_rounding(expected, exact)
    assert agreed > 0.5 * torch_agreed and torch_agreed > 0.05 * sum(map(len, tokens(exact)))
    assert error < 2 * torch_error


def test_default_memory_serves(random_model: Path) -> None:
    """Nothing says how large the cache is: the start measures the largest step and the graphs."""
    options = {"dtype": "float32", "num_kvcache_blocks": None}
    assert_same_tokens(serve(random_model, "triton", **options), serve(random_model, "torch", dtype="float32"))


def test_default_memory_serves_a_hybrid(tmp_path: Path) -> None:
    """The states of rows have their share of the memory, too."""
    save_hybrid(tmp_path)
    found = serve(tmp_path, "triton", dtype="float32", num_kvcache_blocks=None)
    assert_same_tokens(found, serve(tmp_path, "torch", dtype="float32"))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_dense_model_says_the_same(dtype: str, random_model: Path) -> None:
    check_tokens(random_model, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_experts_say_the_same(dtype: str, tmp_path: Path) -> None:
    """Steps of few tokens, and of more than 512: each range of tokens has a product of its own."""
    shape: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_random(tmp_path, model_class=Qwen3MoeForCausalLM, max_position_embeddings=1024, **shape)
    prompts = [*PROMPTS, *draw_prompts([530, 200], seed=2)]
    options = {"max_model_len": 640, "max_num_batched_tokens": 640, "num_kvcache_blocks": 80}
    check_tokens(tmp_path, dtype, prompts=prompts, **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("save", [save_hybrid, save_sparse_hybrid])
def test_a_hybrid_says_the_same(save: Callable[[Path], object], dtype: str, tmp_path: Path) -> None:
    """Decodes run as graphs, which keep the states. A sequence that is preempted computes its state anew."""
    save(tmp_path)
    check_tokens(tmp_path, dtype, num_kvcache_blocks=18)
    with LLM(tmp_path, **OPTIONS | {"attention_backend": "triton", "dtype": dtype, "num_kvcache_blocks": 18}) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.engine.config.use_graphs and llm.stats()["num_preemptions"] > 0


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [*(("int8", dtype) for dtype in TOLERANCES), *((name, "float32") for name in ROUNDS_INPUTS)],
)
@pytest.mark.parametrize("kind", ["dense", "experts", "hybrid"])
def test_quantised_weights_say_the_same(kind: str, quantization: str, dtype: str, tmp_path: Path) -> None:
    """Embedding, head, projections and experts are int8. Steps of more than 128 tokens take the largest tile."""
    if kind == "hybrid":
        save_hybrid(tmp_path)
    elif kind == "experts":
        shape: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        save_random(tmp_path, model_class=Qwen3MoeForCausalLM, **shape)
    else:
        save_random(tmp_path)
    check_tokens(tmp_path, dtype, quantization=quantization)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_and_values_in_int8_say_the_same(dtype: str, random_model: Path) -> None:
    check_tokens(random_model, dtype, kv_cache_dtype="int8")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_and_values_in_fp8_say_the_same_in_graphs(dtype: str, random_model: Path) -> None:
    """The torch backend has no fp8."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    options = {"dtype": dtype, "kv_cache_dtype": "fp8"}
    expected = serve(random_model, "triton", enforce_eager=True, **options)
    assert tokens(serve(random_model, "triton", **options)) == tokens(expected)


def test_requests_with_adapters_say_what_engines_with_them_say(tmp_path: Path) -> None:
    """The weights change between steps, and the graphs find the new ones where the old ones were."""
    pytest.importorskip("peft")
    base = tmp_path / "base"
    save_random(base)
    folders = [None, tmp_path / "first", tmp_path / "second"]
    expected = []
    for seed, folder in enumerate(folders):
        if folder:
            save_adapter(Qwen3ForCausalLM.from_pretrained(base), folder, seed=seed)
        lora = str(folder) if folder else None
        expected.append(tokens(serve(base, "triton", dtype="float32", lora=lora)))
    assert expected[0] != expected[1] != expected[2]
    named = [LoRARequest(folder.name, 1, str(folder)) if folder else None for folder in folders]
    with LLM(base, **OPTIONS | {"attention_backend": "triton", "dtype": "float32"}) as llm:
        requests = [named[i % 3] for i in range(len(PROMPTS))]
        found = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests))
    assert found == [expected[i % 3][i] for i in range(len(PROMPTS))]


def test_embeddings_are_the_same(random_model: Path) -> None:
    found = {}
    for backend in ("triton", "torch"):
        with LLM(random_model, **OPTIONS | {"attention_backend": backend, "dtype": "float32"}) as llm:
            found[backend] = [output["embedding"] for output in llm.embed(PROMPTS, use_tqdm=False)]
    for embedding, expected in zip(found["triton"], found["torch"], strict=True):
        assert embedding == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_log_probabilities_and_scores_are_the_same(dtype: str, random_model: Path) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=i % 3, logprobs=i % 4, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    found = {}
    scores = {}
    for backend in ("triton", "torch"):
        with LLM(random_model, **OPTIONS | {"attention_backend": backend, "dtype": dtype}) as llm:
            found[backend] = llm.generate(PROMPTS, params, use_tqdm=False)
            scores[backend] = llm.score(PROMPTS[1:5], PROMPTS[5:9], use_tqdm=False)
    close = TOLERANCES[dtype]
    for output, expected in zip(found["triton"], found["torch"], strict=True):
        assert output.prompt_logprobs is not None and expected.prompt_logprobs is not None
        for values, wanted, token_id in zip(
            output.prompt_logprobs[1:], expected.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
        ):
            assert values is not None and wanted is not None
            assert values[token_id] == pytest.approx(wanted[token_id], abs=close)
            likeliest = sorted(values.values(), reverse=True)
            assert likeliest == pytest.approx(sorted(wanted.values(), reverse=True), abs=close)
    for score, expected_score in zip(scores["triton"], scores["torch"], strict=True):
        assert score["logprobs"] == pytest.approx(expected_score["logprobs"], abs=close)


def test_drafts_of_a_model_change_no_token(random_model: Path, tmp_path: Path) -> None:
    save_random(tmp_path, seed=1, num_hidden_layers=3)
    params = [SamplingParams(i % 2, 40, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    expected = serve(random_model, "torch", params, dtype="float32")
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert serve_drafts(random_model, config, params, PROMPTS) == tokens(expected)


def test_drafts_from_the_text_change_no_token(tmp_path: Path) -> None:
    save_reciter(tmp_path, head_dim=32)
    prompts = ["abcdefghiabcdefghiab", "lmnopqrlmnopqrlm", "cdefghcd"]
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = serve(tmp_path, "torch", params, prompts, dtype="float32")
    config = {"method": "ngram", "num_speculative_tokens": 3}
    assert serve_drafts(tmp_path, config, params, prompts) == tokens(expected)


def serve_drafts(model: Path, config: dict[str, Any], params: Any, prompts: Any) -> list[list[int]]:
    """Return the tokens of an engine that verifies every draft it can get, and fail if it gets none."""
    options = {"attention_backend": "triton", "dtype": "float32", "speculative_config": config}
    with LLM(model, **OPTIONS | options) as llm:
        speculation = llm.engine.scheduler.speculation
        assert isinstance(speculation, Speculation)
        speculation.costs = FREE
        found = tokens(llm.generate(prompts, params, use_tqdm=False))
        assert llm.stats()["num_draft_tokens"] > 0
    return found


def test_grammars_and_edits_give_the_same_tokens() -> None:
    """Rows with a grammar, with penalties and with neither share steps; graphs end before the sampler."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    params = [
        SamplingParams(0, 48, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(1.0, 48, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9} [0-9]+")),
        SamplingParams(1.0, 48, seed=2, ignore_eos=True, presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(1.0, 48, seed=3, ignore_eos=True),
        SamplingParams(0, 48, min_tokens=40, logit_bias={9: 2.0}, bad_words=["the"]),
    ]
    prompts = ["what is 3 + 4?", "the cat", "once upon a time", "count to 9", "sort: c a b"]
    expected = serve("tiny-qwen3", "torch", params, prompts, dtype="float32")
    assert tokens(serve("tiny-qwen3", "triton", params, prompts, dtype="float32")) == tokens(expected)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_stages_say_the_same(backend: str, enforce_eager: bool, random_model: Path) -> None:
    """Decodes run as graphs. gloo's stages share a card; NCCL's have a card each, and a stream for each link."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    params = [
        SamplingParams(i % 2, 40, seed=i, ignore_eos=True, logprobs=9, presence_penalty=float(i % 3 == 2))
        for i in range(len(PROMPTS))
    ]
    expected = serve(random_model, "torch", params, dtype="float32")
    options = {"pipeline_parallel_size": 2, "distributed_backend": backend, "enforce_eager": enforce_eager}
    options |= {"attention_backend": "triton", "dtype": "float32"}
    with LLM(random_model, **OPTIONS | options) as llm:
        assert llm.engine.config.use_graphs != enforce_eager
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == tokens(found)
    assert_same_tokens(found, expected)


def test_stages_start_with_default_memory(random_model: Path) -> None:
    """Each stage measures its largest step and its graphs, without the others."""
    options = {"dtype": "float32", "num_kvcache_blocks": None, "pipeline_parallel_size": 2}
    expected = serve(random_model, "torch", dtype="float32")
    assert_same_tokens(serve(random_model, "triton", **options), expected)


@pytest.mark.parametrize("quantization", [None, "int8", *ROUNDS_INPUTS])
def test_new_weights_are_those_of_the_next_tokens(quantization: str | None, random_model: Path, tmp_path: Path) -> None:
    """They come from the host. Graphs that were captured before do not read the old ones."""
    save_random(tmp_path, seed=3)
    options = {"dtype": "float32", "quantization": quantization}
    expected = serve(tmp_path, "torch", **options)
    with LLM(random_model, **OPTIONS | {"attention_backend": "triton"} | options) as llm:
        llm.load_weights(load_file(tmp_path / "model.safetensors").items())
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    if quantization in ROUNDS_INPUTS:
        assert_equally_rounded(found, expected, tmp_path, **options)
    else:
        assert_same_tokens(found, expected)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept_says_the_same(level: int, random_model: Path) -> None:
    """Asleep it leaves its cache to others; awake it has its graphs again."""
    with LLM(random_model, **OPTIONS | {"attention_backend": "triton", "dtype": "float32"}) as llm:
        expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        allocated = torch.cuda.memory_allocated()
        llm.sleep(level)
        assert torch.cuda.memory_allocated() < allocated
        llm.wake_up()
        assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)


def test_engines_side_by_side_have_graphs_of_their_own(random_model: Path) -> None:
    """They were captured for other numbers of sequences, and are replayed in turn."""
    expected = tokens(serve(random_model, "torch", dtype="float32"))
    options = OPTIONS | {"attention_backend": "triton", "dtype": "float32"}
    with LLM(random_model, **options) as llm, LLM(random_model, **options | {"max_num_seqs": 3}) as other:
        for _ in range(2):
            assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
            assert tokens(other.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_two_ranks_that_share_the_card_say_the_same(dtype: str, random_model: Path) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_backend": "gloo", "enforce_eager": True}
    check_tokens(random_model, dtype, ranks)
