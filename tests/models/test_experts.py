"""Mixture of experts says, token for token, what transformers says in float32; its kernels are their references."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernel_cases import poisoned_memory
from helpers.tiny import CROWDED, draw_prompts, edit_json, greedy, greedy_all, save_random
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.experts import Operators as CpuExpertOperators
from nanovllm.backends.gpu.combine import combine
from nanovllm.backends.gpu.experts import Operators as TritonExpertOperators
from nanovllm.backends.gpu.route import route
from nanovllm.backends.gpu.triton_shim import tl
from nanovllm.features.families.qwen3_moe.decoder import Experts
from nanovllm.features.families.qwen3_moe.ops import (
    Routing,
    SharedOutput,
    combine_reference,
    grouped_linear_reference,
    route_reference,
)
from nanovllm.models.layers.parallel import Parallel

SHAPE = {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "weights that sum to one": {"norm_topk_prob": True},
    "weights as they are": {"norm_topk_prob": False},
    "dense layers by number": {"mlp_only_layers": [1]},
    "every second layer sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "every expert": {"num_experts_per_tok": 8, "norm_topk_prob": True},
    "one expert of many": {"num_experts": 40, "num_experts_per_tok": 1},
    "no expert at all": {"num_experts": 0},
    "sizes that kernels do not like": {"moe_intermediate_size": 24, "hidden_size": 52, "num_experts": 5},
}


def save(folder: Path, **changes: Any) -> PreTrainedModel:
    return save_random(folder, model_class=Qwen3MoeForCausalLM, **SHAPE | changes)


def say(folder: Path, count: int = 24, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts longer than a step's budget, and some that share a prefix; and what follows them."""
    prefix, *rest = draw_prompts([40, 1, 16, 17, 70, 100])
    prompts = [*rest, *(prefix + tail for tail in draw_prompts([1, 20], seed=1))]
    with LLM(folder, **CROWDED | options) as llm:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return prompts, [output["token_ids"] for output in outputs]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_are_transformers(changes: dict[str, Any], backend: str, tmp_path: Path) -> None:
    model = save(tmp_path, **changes)
    prompts, tokens = say(tmp_path, attention_backend=backend)
    assert tokens == greedy_all(model, prompts, 24, tokens)


def test_triton_says_the_same(tmp_path: Path) -> None:
    model = save(tmp_path, num_hidden_layers=1)
    prompts = draw_prompts([3, 20])
    with LLM(tmp_path, **CROWDED | {"attention_backend": "triton"}) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [greedy(model, prompt, 4) for prompt in prompts]


def test_all_tokens_may_go_to_one_expert(tmp_path: Path) -> None:
    """A router of zeros: we take the first expert, transformers any; so all of them are alike."""
    model = save(tmp_path, num_experts_per_tok=1)
    tensors = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()
            elif ".experts." in name:
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name].zero_()
        elif ".experts." in name:
            before, _, after = name.partition(".experts.")
            tensors[name] = tensors[f"{before}.experts.0.{after.partition('.')[2]}"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts, tokens = say(tmp_path)
    assert tokens == greedy_all(model, prompts, 24, tokens)


def fuse(folder: Path, experts: int) -> None:
    """One tensor for all experts, as transformers 5 holds them."""
    tensors = load_file(folder / "model.safetensors")
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            fused[name] = tensor
        elif ".experts.0.gate_proj." in name:
            prefix = name.partition("0.gate_proj")[0]

            def of(kind: str, prefix: str = prefix) -> list[torch.Tensor]:
                return [tensors[f"{prefix}{e}.{kind}_proj.weight"] for e in range(experts)]

            pairs = zip(of("gate"), of("up"), strict=True)
            fused[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            fused[f"{prefix}down_proj"] = torch.stack(of("down"))
    save_file(fused, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_forms_of_checkpoint_are_loaded(ranks: int, local_ranks: None, tmp_path: Path) -> None:
    model = save(tmp_path)
    expected = None
    for form in ("one tensor an expert", "one for all"):
        if form == "one for all":
            fuse(tmp_path, 8)
        prompts, tokens = say(tmp_path, tensor_parallel_size=ranks)
        expected = expected or greedy_all(model, prompts, 24, tokens)
        assert tokens == expected, form


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be from 1 to num_experts, which is 8"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, **CROWDED)


def test_experts_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    save(tmp_path, moe_intermediate_size=31)
    with pytest.raises(ValueError, match="moe_intermediate_size is 31, which 2 ranks cannot share"):
        LLM(tmp_path, tensor_parallel_size=2, **CROWDED)


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Memory of the process's own, at its highest, without that of a process that loads next to nothing."""
    large = tmp_path / "large"
    small = tmp_path / "small"
    shape = {"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 16, "moe_intermediate_size": 512}
    save(large, **shape)
    save(small, **shape | {"num_experts": 2, "moe_intermediate_size": 32, "hidden_size": 64})
    script = """
import re, sys, threading, time
from nanovllm import LLM
def watch():
    while True:
        found.append(int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10)
        time.sleep(0.002)
found = []
threading.Thread(target=watch, daemon=True).start()
options = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 1, "max_num_seqs": 2}
LLM(sys.argv[1], attention_backend="cpu", max_num_batched_tokens=64, **options).close()
print(max(found))
"""

    def peak(folder: Path) -> int:
        return int(subprocess.run([sys.executable, "-c", script, folder], capture_output=True, check=True).stdout)

    weights = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert weights > 192 << 20
    least = peak(small)
    assert peak(large) - least < 1.1 * weights, "one tensor an expert"
    fuse(large, 16)
    assert peak(large) - least < 1.1 * weights, "one for all"


# ---- kernels


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_routing(got: Routing, expected: Routing, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(got.weights.to(dtype), expected.weights.to(dtype), equal_nan=True)
    for name in ("places", "tokens", "offsets"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (5, 128, 8), (40, 5, 5), (33, 64, 1), (520, 16, 8)])
def test_routing_is_its_reference(tokens: int, experts: int, k: int, normalize: bool) -> None:
    logits = draw(tokens, experts + 1)[:, :experts]  # beside them is the gate of a shared expert
    logits[tokens // 2] = 0.0  # ties: the lowest number wins
    slots = torch.arange(tokens)
    slots[1::3] = -1
    assert_same_routing(route(logits, k, normalize, slots), route_reference(logits, k, normalize, slots))


def reduce_as_compiled(reduction: Any, values: Any) -> Any:
    """A reduction by Triton's own combine function, as on a GPU. The interpreter would take numpy's maximum instead."""
    if reduction.combine_fn is tl.standard._sum_combine:
        return reduction.sum(values[0])
    return reduction.generic_reduce(values)


@pytest.mark.parametrize(
    "broken", [[float("nan")], [float("inf")], [float("-inf")] * 8], ids=["nan", "inf", "all -inf"]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_with_broken_logits_has_k_different_experts(
    normalize: bool, broken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs with the same expert would share a place, and other places would keep what lay in memory."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", reduce_as_compiled)
    logits = draw(5, 8)
    logits[1, -len(broken) :] = torch.tensor(broken)
    slots = torch.tensor([0, 1, -1, 3, 4])
    with poisoned_memory():
        got = route(logits, 4, normalize, slots)
    expected = route_reference(logits, 4, normalize, slots)
    assert sorted(got.places.flatten().tolist()) == list(range(20))
    assert got.weights.isnan().any(1).tolist() == [False, True, False, False, False]
    assert_same_routing(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 8, 2), (1, 8, 2), (33, 5, 5), (32, 128, 8), (700, 60, 4)])
def test_routing_on_the_cpu_is_its_reference(
    tokens: int, experts: int, k: int, normalize: bool, dtype: torch.dtype
) -> None:
    logits = draw(tokens, experts + 1, scale=8.0).to(dtype)[:, :experts]  # beside them is the gate of a shared expert
    logits[tokens // 2 : tokens // 2 + 1] = 0.0  # ties: the lowest number wins
    slots = torch.arange(tokens)
    slots[1::3] = -1
    got = CpuExpertOperators(CpuBackend()).route(logits, k, normalize, slots)
    expected = route_reference(logits, k, normalize, slots)
    assert torch.equal(got.weights, got.weights.to(dtype).float())
    assert_same_routing(got, expected, dtype)


BROKEN_ROWS = {
    "nan first": (0, float("nan")),
    "nan in the middle": (3, float("nan")),
    "nan last": (7, float("nan")),
    "inf": (5, float("inf")),
    "all -inf": (slice(None), float("-inf")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("at", "value"), BROKEN_ROWS.values(), ids=BROKEN_ROWS)
def test_on_the_cpu_a_token_with_broken_logits_has_k_different_experts_and_nan_weights(
    at: int | slice, value: float, normalize: bool, dtype: torch.dtype
) -> None:
    """One expert k times would be a sum nobody asked for; finite weights would hide the row from the sampler."""
    logits = draw(5, 8, scale=4.0).to(dtype)
    ordinary = logits.clone()
    logits[1, at] = value
    logits[2, at] = value  # padding
    slots = torch.tensor([0, 1, -1, 3, 4])
    operators = CpuExpertOperators(CpuBackend())
    got = operators.route(logits, 4, normalize, slots)
    assert got.weights[1].isnan().all()
    assert_same_routing(got, route_reference(logits, 4, normalize, slots), dtype)
    others = operators.route(ordinary, 4, normalize, slots)
    for row in (0, 3, 4):
        assert torch.equal(got.weights[row], others.weights[row]), "a broken row changes no other"


def test_routing_counts_and_sorts() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [9.0, 9.0, 9.0], [0.0, 1.0, 2.0]])
    routing = route_reference(logits, 2, True, torch.tensor([0, 1, -1, 3]))
    assert routing.offsets.tolist() == [0, 1, 3, 6]  # expert 0: token 1; 1: tokens 0, 3; 2: tokens 0, 1, 3
    assert routing.tokens.tolist() == [1, 0, 3, 0, 1, 3, 2, 2]
    assert routing.places.tolist() == [[1, 3], [0, 4], [6, 7], [5, 2]]
    assert routing.weights.sum(1).tolist() == pytest.approx([1.0] * 4)


def routing_of(tokens: int, experts: int, k: int) -> Routing:
    slots = torch.arange(tokens)
    slots[tokens // 2 :: 7] = -1
    return route_reference(draw(tokens, experts, seed=3), k, True, slots)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "sizes"), [(1, 4, 2, (64, 96)), (40, 8, 2, (70, 33)), (150, 3, 2, (64, 64))]
)
def test_grouped_linear_is_its_reference(
    tokens: int, experts: int, k: int, sizes: tuple[int, int], gather: bool
) -> None:
    routing = routing_of(tokens, experts, k)
    x = draw(tokens if gather else tokens * k, sizes[0])
    weight = draw(experts, sizes[1], sizes[0], seed=1)
    real = int(routing.offsets[-1])
    products = (TritonExpertOperators(None).grouped_linear, grouped_linear_reference)
    got, expected = (f(x, weight, routing, gather)[:real] for f in products)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("has_shared", [True, False])
def test_combining_is_its_reference_and_reads_no_padding(has_shared: bool) -> None:
    routing = routing_of(30, 8, 3)
    y = draw(90, 1500)
    y[int(routing.offsets[-1]) :] = float("nan")
    is_real = routing.places[:, 0] < routing.offsets[-1]
    shared = SharedOutput(draw(30, 1500, seed=4), draw(30, 9, scale=5.0)[:, 8:]) if has_shared else None
    got = combine(y, routing, shared)
    expected = combine_reference(y, routing, shared)
    torch.testing.assert_close(got[is_real], expected[is_real])
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernel_is_its_reference_and_depends_on_no_company(dtype: torch.dtype) -> None:
    backend = CpuBackend()
    operators = CpuExpertOperators(backend)
    experts = 6
    k = 2
    module = Experts(experts, 96, 64, Parallel())
    module.gate_up.copy_(draw(experts, 128, 96, scale=0.1))
    module.down.copy_(draw(experts, 96, 64, seed=1, scale=0.1))
    module = module.to(dtype)
    plain = module.gate_up.clone()
    backend.pack_weights([module])
    assert not torch.equal(plain, module.gate_up)
    routing = routing_of(40, experts, k)
    x = draw(40, 96, seed=2).to(dtype)
    real = int(routing.offsets[-1])
    got = operators.grouped_linear(x, module.gate_up, routing, True)[:real]
    expected = grouped_linear_reference(x.float(), plain.float(), routing, True)[:real]
    torch.testing.assert_close(got.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0.01)
    for token in (0, 7, 39):
        alone = route_reference(
            draw(40, experts, seed=3)[token : token + 1], k, True, torch.zeros(1, dtype=torch.int64)
        )
        one = operators.grouped_linear(x[token : token + 1], module.gate_up, alone, True)
        assert torch.equal(one[alone.places[0].long()], got[routing.places[token].long()])
    y = draw(40 * k, 96, seed=4).to(dtype)
    torch.testing.assert_close(operators.combine(y, routing), combine_reference(y, routing))
