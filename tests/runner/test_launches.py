"""The work that a step gives a GPU, counted without one: on fake tensors, with Triton's launches noted instead of done.

On fake tensors an operator that needs a value, and so would wait for the device, raises.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.paths import TESTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from helpers.direct_launches import quantize
from helpers.pretend_cuda import DEVICE, Operators, noted, pretend_runner, unscored_plan

from nanovllm.backends.gpu import experts, gate_and_mul, paged_decode, paged_prefill, rms_norm
from nanovllm.backends.gpu.combine import combine
from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.backends.gpu.few_rows import MAX_ROWS
from nanovllm.backends.gpu.few_rows_layer import MOST_BYTES, FewRowsLayer, use_few_rows
from nanovllm.backends.gpu.round_inputs import give_rounded
from nanovllm.backends.gpu.startup import keep_one_layer_of_each_kind
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.backends.steps import EAGER
from nanovllm.config import MAX_NUM_SEQS
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.features.quantized.codes import InputScales
from nanovllm.models.decoder import Layer
from nanovllm.models.layers.parallel import Parallel
from nanovllm.ops.attention import AttentionVariant, KVCache

LAYERS = 28
ONCE = {f"_{name}_kernel": 1 for name in ("step_inputs", "share", "stats", "filter", "draw")}
A_LAYER = {"_norm_rope_store_kernel": 1, "_split_kernel": 1, "_gate_and_mul_kernel": 1}
"""Beside its two norms; the last norm is one more."""


def test_a_step_of_decodes_launches_what_it_must_and_nothing_else() -> None:
    """Each is a node of the CUDA graph; at one sequence, they are most of its time."""
    with pretend_runner() as runner:
        graphs = CudaGraphs(runner)
        with noted() as launches, Operators() as operators:
            graphs.run_once(256)
    counts = Counter(launch.kernel.__name__ for launch in launches)
    assert counts == ONCE | dict.fromkeys(A_LAYER, LAYERS) | {"_rms_norm_kernel": 2 * LAYERS + 1}
    # Four matrices a layer and the LM head; the embedding; the tokens for the rows' next step.
    assert operators.counts == {"linear": 4 * LAYERS + 1, "embedding": 1, "index_put_": 1}
    assert len(launches) + operators.counts.total() == 261


def test_own_products_take_the_activation_and_the_residual_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has one launch fewer. More rows than a tile has are torch's, as without them, and so is the head."""
    monkeypatch.setattr(TritonKernels, "few_rows_bytes", sys.maxsize)
    with pretend_runner() as runner:
        graphs = CudaGraphs(runner)
        for num_rows in (1, MAX_ROWS, MAX_ROWS + 1):
            with noted() as launches, Operators() as operators:
                graphs.run_once(num_rows)
            counts = Counter(launch.kernel.__name__ for launch in launches)
            if num_rows > MAX_ROWS:
                assert counts == ONCE | dict.fromkeys(A_LAYER, LAYERS) | {"_rms_norm_kernel": 2 * LAYERS + 1}
                assert operators.counts["linear"] == 4 * LAYERS + 1
                continue
            in_layers = {name: LAYERS for name in A_LAYER if name != "_gate_and_mul_kernel"}
            own = {"_product_kernel": 4 * LAYERS, "_rms_norm_kernel": 2 * LAYERS + 1}
            assert counts == ONCE | in_layers | own
            assert operators.counts == {"linear": 1, "embedding": 1, "index_put_": 1}
            assert len(launches) + operators.counts.total() == 261 - LAYERS
            products = [launch for launch in launches if launch.kernel.__name__ == "_product_kernel"]
            residual = products[0].kernel.arg_names.index("residual_ptr")
            followed = Counter((one.config["SILU"], one.args[residual] is not None) for one in products)
            # Those of qkv and the last down; of gate and up; of o and the other downs.
            assert followed == {(False, False): LAYERS + 1, (True, False): LAYERS, (False, True): 2 * LAYERS - 1}


@pytest.mark.parametrize(
    ("model", "options", "num_layers"),
    [
        ("qwen3-0.6b", {}, LAYERS),
        ("qwen3-8b", {}, 0),  # its matrices are too large
        ("qwen3-30b-a3b", {}, 0),  # experts
        ("qwen3-0.6b", {"parallel": Parallel(0, 2)}, 0),
        ("qwen3-0.6b", {"dtype": "float32"}, 0),
    ],
    ids=["small", "large", "experts", "two ranks", "float32"],
)
def test_plain_layers_of_small_matrices_take_own_products(model: str, options: dict[str, Any], num_layers: int) -> None:
    with pretend_runner(model, **options) as runner:
        use_few_rows(runner.model.modules(), MOST_BYTES)
        assert sum(isinstance(layer, FewRowsLayer) for layer in runner.model.layers) == num_layers


def test_the_start_runs_layers_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer ends as the last norm wants it, even if layers of another kind have products of our own."""
    windows = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}
    windows["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    monkeypatch.setattr(TritonKernels, "few_rows_bytes", sys.maxsize)
    with pretend_runner(num_layers=3, changes=windows) as runner:
        layers = list(runner.model.layers)
        layers[2].__class__ = Layer  # as if its matrices were quantised, and those of the others were not
        del layers[2].is_last
        with keep_one_layer_of_each_kind(runner.model), noted():
            assert list(runner.model.layers) == layers
            CudaGraphs(runner).run_once(1)


@pytest.mark.parametrize("size", [16, 256])
def test_norms_and_silu_round_the_inputs_of_the_products_that_follow(size: int) -> None:
    """The output of attention alone is rounded by a kernel of its own."""
    with pretend_runner() as runner:
        quantize(runner, 8, None, InputScales.TOKEN)
        graphs = CudaGraphs(runner)
        with noted() as launches, Operators() as operators:
            graphs.run_once(size)
    counts = Counter(launch.kernel.__name__ for launch in launches)
    products = {"_product_kernel": 4 * LAYERS + 1, "_round_inputs_kernel": LAYERS}
    assert counts == ONCE | dict.fromkeys(A_LAYER, LAYERS) | {"_rms_norm_kernel": 2 * LAYERS + 1} | products
    assert "linear" not in operators.counts


def test_a_hybrid_rounds_the_outputs_of_its_states_alone() -> None:
    """Norms and gates write all that its other products read. A program of the states' norm has some heads of a row."""
    with pretend_runner("qwen3.5-0.8b", max_num_seqs=64) as runner:
        quantize(runner, 8, None, InputScales.TOKEN)
        graphs = CudaGraphs(runner)
        with noted() as launches:
            graphs.run_once(64)
    counts = Counter(launch.kernel.__name__ for launch in launches)
    assert counts["_product_kernel"] == 18 * 4 + 6 * 5 + 1
    assert counts["_round_inputs_kernel"] == 18


def test_experts_need_no_value_on_the_host_either() -> None:
    """Qwen3-30B-A3B: a router, and two grouped products of our own, where a dense layer has two products of torch's."""
    layers = 48
    with pretend_runner("qwen3-30b-a3b") as runner:
        graphs = CudaGraphs(runner)
        with noted() as launches, Operators() as operators:
            graphs.run_once(64)
    counts = Counter(launch.kernel.__name__ for launch in launches)
    once_a_layer = (*A_LAYER, "_choose_experts_kernel", "_sort_pairs_kernel", "_combine_experts_kernel")
    in_layers = dict.fromkeys(once_a_layer, layers) | {"_product_kernel": 2 * layers}
    assert counts == ONCE | in_layers | {"_rms_norm_kernel": 2 * layers + 1}
    assert operators.counts == {"linear": 3 * layers + 1, "embedding": 1, "index_put_": 1}


@pytest.mark.parametrize("num_seqs", [1, 64])
def test_a_state_per_row_needs_no_value_on_the_host_either(num_seqs: int) -> None:
    """Qwen3.5-0.8B: 18 layers with a state, and 6 with keys and values, whose output has a gate."""
    with pretend_runner("qwen3.5-0.8b", max_num_seqs=64) as runner:
        graphs = CudaGraphs(runner)
        with noted() as launches, Operators() as operators:
            graphs.run_once(num_seqs)
    counts = Counter(launch.kernel.__name__ for launch in launches)
    in_states = dict.fromkeys(("_causal_conv_kernel", "_gated_delta_kernel", "_gated_rms_norm_kernel"), 18)
    in_attention = dict.fromkeys(("_norm_rope_store_kernel", "_split_kernel"), 6)
    in_all = {"_gate_and_mul_kernel": 24 + 6, "_rms_norm_kernel": 2 * 24 + 1}
    assert counts == ONCE | in_states | in_attention | in_all
    # In a layer, two products of the MLP, and two with a state or three with attention; the LM head.
    assert operators.counts == {"linear": 18 * 4 + 6 * 5 + 1, "embedding": 1, "index_put_": 1}


def test_a_shared_expert_takes_two_products_and_an_activation_more() -> None:
    """Qwen3.5-35B-A3B: its gate is a row of the router's matrix, and its output is added with those of the others."""
    layers = 40
    with pretend_runner("qwen3.5-35b-a3b", max_num_seqs=64) as runner:
        graphs = CudaGraphs(runner)
        with noted() as launches, Operators() as operators:
            graphs.run_once(64)
    counts = Counter(launch.kernel.__name__ for launch in launches)
    in_states = dict.fromkeys(("_causal_conv_kernel", "_gated_delta_kernel", "_gated_rms_norm_kernel"), 30)
    in_attention = dict.fromkeys(("_norm_rope_store_kernel", "_split_kernel"), 10)
    of_experts = ("_choose_experts_kernel", "_sort_pairs_kernel", "_combine_experts_kernel")
    # Gates of the experts, of the shared one, and of attention.
    in_all = dict.fromkeys(of_experts, layers) | {"_product_kernel": 2 * layers, "_gate_and_mul_kernel": 90}
    assert counts == ONCE | in_states | in_attention | in_all | {"_rms_norm_kernel": 2 * layers + 1}
    # In a layer, the router and two products of the shared expert, and two with a state or three with attention.
    assert operators.counts == {"linear": 30 * 5 + 10 * 6 + 1, "embedding": 1, "index_put_": 1}


def test_a_mixed_step_waits_for_nothing_and_copies_nothing() -> None:
    plan = unscored_plan([1, 1, 100, 198])
    with pretend_runner() as runner, noted() as launches, Operators() as operators:
        runner.run_head(runner.run_layers(plan, EAGER))
    counts = Counter(launch.kernel.__name__ for launch in launches)
    in_layers = dict.fromkeys((*A_LAYER, "_prefill_kernel"), LAYERS)
    assert counts == ONCE | in_layers | {"_rms_norm_kernel": 2 * LAYERS + 1}
    # One more: the hidden states of the sequences' last tokens.
    assert operators.counts == {"linear": 4 * LAYERS + 1, "embedding": 1, "index_put_": 1, "sub": 1, "index": 1}


def test_the_largest_options_give_grids_that_cuda_takes() -> None:
    """The first dimension of a grid may be 2^31 - 1, the others 65,535: `noted` asserts it for every launch."""
    with FakeTensorMode(), noted() as launches, torch.device(DEVICE):
        num_tokens = 1 << 21
        cache = KVCache(*(torch.empty(8, 64, 1, 128, dtype=torch.bfloat16) for _ in range(2)))
        tables = torch.empty(MAX_NUM_SEQS, 64, dtype=torch.int32)
        lengths = torch.empty(MAX_NUM_SEQS, dtype=torch.int32)
        starts = torch.empty(MAX_NUM_SEQS + 1, dtype=torch.int32)
        q = torch.empty(num_tokens, 16, 128, dtype=torch.bfloat16)
        with (
            mock.patch.object(paged_decode, "num_multiprocessors", lambda device: 132),
            mock.patch.object(paged_decode, "shared_memory_kib", lambda device: 227),
            mock.patch.object(paged_prefill, "shared_memory_kib", lambda device: 227),
        ):
            paged_prefill.paged_prefill(q, cache, starts, lengths, tables, num_tokens, 1.0, torch.empty_like(q))
            metadata = paged_decode.decode_metadata(lengths, cache, 16)
            decodes = torch.empty(MAX_NUM_SEQS, 16, 128, dtype=torch.bfloat16)
            paged_decode.paged_decode(decodes, cache, tables, metadata, 1.0, torch.empty_like(decodes))
        pairs = torch.empty(num_tokens, 8, dtype=torch.int32)
        routing = Routing(pairs.float(), pairs, pairs.flatten(), torch.empty(129, dtype=torch.int32))
        x = torch.empty(num_tokens, 1024, dtype=torch.bfloat16)
        weight = torch.empty(128, 768, 1024, dtype=torch.bfloat16)
        y = experts.Operators(None).grouped_linear(x, weight, routing, gather=True)
        combine(y, routing)
    assert len(launches) == 5


def test_the_host_s_values_are_all_that_a_step_s_shapes_need() -> None:
    """The guard of the tests above is one: a read of the device's values does raise."""
    with pretend_runner() as runner, pytest.raises(RuntimeError):
        runner.device_rows.last_token.tolist()


def test_a_start_compiles_the_attention_of_each_variant_that_layers_have() -> None:
    """Two layers with the same window launch the same kernels. Sinks differ from layer to layer, and kernels do not."""
    sinks = [torch.zeros(16) for _ in range(2)]
    variants = [AttentionVariant(9), None, AttentionVariant(9), *(AttentionVariant(9, sinks=each) for each in sinks)]
    with pretend_runner(num_layers=len(variants)) as runner:
        for layer, variant in zip(runner.model.layers, variants, strict=True):
            layer.self_attn.variant = variant
        with keep_one_layer_of_each_kind(runner.model):
            assert len(runner.model.layers) == 3
        assert len(runner.model.layers) == len(variants)


@pytest.fixture(scope="module")
def directly() -> dict[str, object]:
    """The findings of helpers/direct_launches.py, in a process of its own: here Triton may be in its interpreter."""
    script = TESTS / "helpers" / "direct_launches.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_direct_launch_is_triton_s_own_to_the_last_argument(directly: dict[str, object]) -> None:
    assert directly["equal"] and directly["unaligned_equal"]


@pytest.mark.slow
def test_a_direct_launch_calls_fewer_functions_than_triton_s(directly: dict[str, int]) -> None:
    """The time that this saves is printed by benchmarks/bench_small_costs.py."""
    assert 0 < directly["direct_calls"] < 0.75 * directly["triton_calls"], directly


@pytest.mark.slow
def test_all_kernels_are_compiled_before_the_first_step(directly: dict[str, object]) -> None:
    assert directly["compiled_ahead"] >= 10 and directly["compiled_by_steps"] == 0, directly


@pytest.mark.slow
def test_nothing_is_compiled_while_serving(directly: dict[str, dict[str, list[str]]]) -> None:
    """Edits, masks, log-probabilities, scores, prompts and batches of any size, drafts, quantised: all is ready.

    Each rank of several is ready for its share, too. And no argument has an address that would make a variant.
    """
    assert directly["missing"]
    assert not any(directly["missing"].values()), directly["missing"]


class WriteGuard(TorchDispatchMode):
    """Fails when an operator of torch writes to a tensor in one of some storages."""

    def __init__(self, storages: dict[int, Tensor]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                assert value.untyped_storage()._cdata not in self.storages, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_nobody_writes_to_activations_that_carry_their_rounded_form(model: str) -> None:
    """Tensors of inference mode count no versions, so nothing could find such a write in a step."""
    made: dict[int, Tensor] = {}

    def note(x: Tensor, rounds: bool) -> Any:
        if rounds:
            made[x.untyped_storage()._cdata] = x  # kept, so that no other tensor gets its storage
        return give_rounded(x, rounds)

    with pretend_runner(model, num_layers=4) as runner, ExitStack() as patches:
        quantize(runner, 8, None, InputScales.TOKEN)
        for module in (rms_norm, gate_and_mul):
            patches.enter_context(mock.patch.object(module, "give_rounded", note))
        with noted() as launches, WriteGuard(made):
            runner.run_head(runner.run_layers(unscored_plan([1, 1, 100]), EAGER))
        touching = [
            one.kernel.__name__
            for one in launches
            if any(isinstance(value, Tensor) and value.untyped_storage()._cdata in made for value in one.args)
        ]
    # Each is in the launch that makes it and in no other: our products read the rounded form alone.
    assert len(touching) == len(made) > 4, touching
