"""Computes the least that a workload costs: bytes and FLOPs of every step, and the machine's rates.

The floor of a step is the sum over its operators of the larger of (bytes / bandwidth) and (FLOPs / matmul rate). It
counts every byte once: weights, activations in and out, keys and values (and the states of layers that have one in
their place) read and written, one read of the logits. It assumes that operators do not overlap and that no cache keeps
weights between steps. Launches and host work are free.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.backends import Backend, make_backend
from nanovllm.backends.devices import DEVICES
from nanovllm.config import ResolvedConfig
from nanovllm.load import make_quantizer
from nanovllm.models.layers.linear import MatrixModule
from nanovllm.models.layers.weights import ShardedLayer
from nanovllm.models.sizes import Sizes


@dataclass(frozen=True)
class Model:
    """A model, whose sizes are counted.

    Attributes:
        config: its transformers configuration.
        dtype: the type of its activations, of its weights unless these are quantised, and of its cache unless that has
            a type of its own.
        quantized_itemsize: the bytes of a weight, if some are quantised: the mean of all. None if none are.
        kv_dtype: the type of its keys and values; None: dtype.
    """

    config: Any
    dtype: torch.dtype
    quantized_itemsize: float | None = None
    kv_dtype: torch.dtype | None = None

    @staticmethod
    def of(config: ResolvedConfig, hf_config: Any) -> "Model":
        """Return the model as an engine with these options has it."""
        dtype = getattr(torch, config.dtype)
        model = Model(hf_config, dtype, kv_dtype=getattr(torch, config.kv_dtype))
        quantizer = make_quantizer(config, hf_config)
        if quantizer is None:
            return model
        num_bytes = quantizer.count_bytes(model.sizes.model, dtype.itemsize)
        return replace(model, quantized_itemsize=num_bytes / model.sizes.num_parameters)

    @functools.cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.config)

    @property
    def weight_itemsize(self) -> float:
        return self.quantized_itemsize or self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights."""
        return round(self.sizes.num_parameters * self.weight_itemsize)

    @functools.cached_property
    def kv_bytes_per_token(self) -> int:
        return self.sizes.kv_bytes(self.kv_dtype or self.dtype)

    @functools.cached_property
    def row_bytes(self) -> int:
        return self.sizes.row_bytes(self.dtype)

    @functools.cached_property
    def matrices(self) -> Counter[tuple[int, int]]:
        """How many matrices of each (out features, in features) multiply every token. The LM head is not included."""
        modules = self.sizes.model.layers.modules()
        return Counter((*module.weight.shape,) for module in modules if isinstance(module, MatrixModule))

    @functools.cached_property
    def experts(self) -> list[list[Tensor]]:
        """The matrices of one expert, [out, in] each, of each layer that has experts."""
        layers = [module for module in self.sizes.model.modules() if isinstance(module, ShardedLayer)]
        stacks = [[stack[0] for stack in layer.list_matrices() if stack.dim() > 2] for layer in layers]
        return list(filter(None, stacks))

    @property
    def experts_per_token(self) -> int:
        """How many experts of a layer each token has."""
        return int(self.config.num_experts_per_tok)

    @functools.cached_property
    def states(self) -> list[int]:
        """How many numbers a row's state has, of each layer that has one in place of keys and values."""
        layers = [module for module in self.sizes.model.modules() if isinstance(module, ShardedLayer)]
        return [count for layer in layers if (count := layer.count_state())]

    @functools.cached_property
    def windows(self) -> Counter[int | None]:
        """How many layers of attention have each sliding window, or none."""
        windows: Counter[int | None] = Counter(variant.window for variant in self.sizes.find_variants())
        windows[None] += self.config.num_hidden_layers - len(self.states) - windows.total()
        return +windows

    @property
    def vocabulary_parameters(self) -> int:
        """The parameters of the LM head."""
        return int(self.config.vocab_size * self.config.hidden_size)

    @property
    def matrix_parameters(self) -> int:
        """The parameters that multiply one token: the matrices of the layers, and those of its experts."""
        every = sum(count * rows_in * rows_out for (rows_out, rows_in), count in self.matrices.items())
        return every + sum(self.experts_per_token * count_expert(expert) for expert in self.experts)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the products with weights and LM head, two per parameter. Attention's are not included."""
        return 2 * (self.matrix_parameters + self.vocabulary_parameters)

    def describe(self) -> dict[str, Any]:
        return {
            "itemsize": self.dtype.itemsize,
            "weight_itemsize": self.weight_itemsize,
            "parameters": self.sizes.num_parameters,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "flops_per_token": self.flops_per_token,
        }


def count_expert(expert: Sequence[Tensor]) -> int:
    """Return how many parameters one expert has."""
    return sum(matrix.numel() for matrix in expert)


def count_activations(expert: Sequence[Tensor]) -> int:
    """Return how many numbers the products of one expert read and write for a token."""
    return sum(sum(matrix.shape) for matrix in expert)


def count_keys(computed: int, scheduled: int, window: int | None) -> tuple[int, int]:
    """Return how many keys attention reads for a sequence of a step, and how many pairs of a query and a key it has.

    Query i of the `scheduled` ones, from 1, sees computed + i keys, or the last `window` of them.
    """
    end = computed + scheduled
    if window is None or window >= end:
        return end, scheduled * computed + scheduled * (scheduled + 1) // 2
    seeing_all = max(window - computed, 0)  # queries whose window begins with the first key
    pairs = seeing_all * computed + seeing_all * (seeing_all + 1) // 2 + (scheduled - seeing_all) * window
    return min(end, window + scheduled - 1), pairs


@dataclass(frozen=True)
class Machine:
    """Measured rates: bytes per second copied (reads and writes count) and read, and FLOPs per second."""

    copy_rate: float
    read_rate: float
    matmul_rate: float

    @property
    def bandwidth(self) -> float:
        """The better of the two rates. On most CPUs a copy also reads the memory that it overwrites."""
        return max(self.copy_rate, self.read_rate)

    def times(self, number: int) -> "Machine":
        """Return the rates of so many of these machines together."""
        return Machine(number * self.copy_rate, number * self.read_rate, number * self.matmul_rate)


MACHINES = {
    "h100": ("cuda", 80, 3350, 989),
    "h200": ("cuda", 141, 4800, 989),
    "a100": ("cuda", 80, 2040, 312),
    "l4": ("cuda", 24, 300, 121),
    "rtx4090": ("cuda", 24, 1010, 165),
    "laptop": ("cpu", 16, 60, 0.5),
    "server": ("cpu", 128, 460, 10),
}
"""For each named machine: its device, memory in GiB, GB/s, and dense TFLOP/s in 16 bits, as data sheets say."""


@dataclass(frozen=True)
class Cost:
    """The cost of one or more steps. `seconds` is the floor, and `parts` has the seconds of each part of it."""

    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: "Cost") -> "Cost":
        parts = self.parts | {name: self.parts.get(name, 0.0) + seconds for name, seconds in other.parts.items()}
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes, self.flops + other.flops, parts)


def step_cost(model: Model, machine: Machine, work: Iterable[tuple[int, int]], num_sampled: int) -> Cost:
    """Return the cost of one step. work holds (tokens in the KV cache, tokens to compute) of each of its sequences.

    Its parts are decode attention, products, states, head and sampler. In a step that computes a prompt, all but head
    and sampler is one part, prompts.
    """
    sequences = list(work)
    has_prompt = any(scheduled > 1 for _, scheduled in sequences)
    n = sum(scheduled for _, scheduled in sequences)
    config = model.config
    size = model.dtype.itemsize
    weight_size = model.weight_itemsize
    total = Cost()

    def operator(part: str, num_bytes: float, flops: float, times: int = 1) -> None:
        nonlocal total
        seconds = times * max(num_bytes / machine.bandwidth, flops / machine.matmul_rate)
        if has_prompt and part not in ("head", "sampler"):
            part = "prompts"
        total += Cost(seconds, times * num_bytes, times * flops, {part: seconds})

    for (rows_out, rows_in), count in model.matrices.items():
        num_bytes = rows_in * rows_out * weight_size + n * (rows_in + rows_out) * size
        operator("products", num_bytes, 2 * n * rows_in * rows_out, count)
    for expert in model.experts[:1]:  # all have the same sizes
        num_experts = config.num_experts
        # The expected number of experts that get a token, if routing is even and independent for each token.
        touched = num_experts * (1 - (1 - model.experts_per_token / num_experts) ** n)
        pairs = n * model.experts_per_token
        one = count_expert(expert)
        num_bytes = touched * one * weight_size + pairs * count_activations(expert) * size
        operator("products", num_bytes, 2 * pairs * one, len(model.experts))
    if num_sampled:
        logits = num_sampled * config.vocab_size * size
        num_bytes = model.vocabulary_parameters * weight_size + logits
        operator("head", num_bytes, 2 * num_sampled * model.vocabulary_parameters)
        operator("sampler", logits, 0)
    num_attention = config.num_hidden_layers - len(model.states)
    for window, num_layers in model.windows.items():
        counts = [count_keys(computed, scheduled, window) for computed, scheduled in sequences]
        num_bytes = (sum(read for read, _ in counts) + n) * model.kv_bytes_per_token * num_layers / num_attention
        pairs = sum(met for _, met in counts)
        operator("decode attention", num_bytes, 4 * num_layers * config.num_attention_heads * config.head_dim * pairs)
    if model.states:
        # A step reads and writes the state of each of its sequences once. A token takes four products with it.
        operator("states", 2 * len(sequences) * model.row_bytes, 8 * n * sum(model.states))
    return total


Step = tuple[list[tuple[int, int]], int]
"""(work, num_sampled), as `step_cost` takes them."""


def ideal_steps(
    lengths: Sequence[tuple[int, int]], max_num_seqs: int, max_num_batched_tokens: int, shared_prefix: int = 0
) -> Iterator[Step]:
    """Yield the steps that the engine takes for (input, output) lengths if everything fits its KV cache.

    A step computes one token of each running sequence, then prompts in order, in chunks, as far as the budget allows.
    Only the first prompt computes a shared prefix.
    """
    waiting = [(prompt, output, shared_prefix if i else 0) for i, (prompt, output) in enumerate(lengths)][::-1]
    running: list[list[int]] = []  # [tokens computed, tokens to come]
    partial: list[int] | None = None  # of the prompt in hand: [computed, length, output]
    while waiting or running or partial:
        work = [(computed, 1) for computed, _ in running]
        budget = max_num_batched_tokens - len(running)
        started: list[list[int]] = []
        while budget > 0 and (partial or (waiting and len(running) + len(started) < max_num_seqs)):
            if partial is None:
                prompt, output, cached = waiting.pop()
                partial = [min(cached, prompt - 1), prompt, output]
            computed, prompt, output = partial
            count = min(budget, prompt - computed)
            work.append((computed, count))
            budget -= count
            partial[0] += count
            if partial[0] == prompt:
                started.append([prompt, output - 1])
                partial = None
        yield work, len(running) + len(started)
        running = [[computed + 1, left - 1] for computed, left in running]
        running = [sequence for sequence in running + started if sequence[1] > 0]


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure a large copy, a large sum and a large product in dtype; each rate is the best of a few tries.

    The product is also tried in float32, which is faster if the device has no instructions for dtype.
    """
    backend = make_backend("torch", device)
    num_bytes, (m, n, k) = DEVICES[device.type].measured
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_rate = 2 * num_bytes / _best_seconds(functools.partial(target.copy_, source), backend)
    read_rate = num_bytes / _best_seconds(source.sum, backend)
    del source, target
    seconds = float("inf")
    for kind in {dtype, torch.float32}:
        x = torch.randn(m, k, device=device).to(kind)
        weight = torch.randn(n, k, device=device).to(kind)
        seconds = min(seconds, _best_seconds(functools.partial(torch.nn.functional.linear, x, weight), backend))
        del x, weight
    backend.release_memory()  # the engines run in other processes, which need the memory
    return Machine(copy_rate, read_rate, 2 * m * n * k / seconds)


def _best_seconds(run: Callable[[], object], backend: Backend) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(7):
            backend.synchronize()
            start = time.perf_counter()
            run()
            backend.synchronize()
            best = min(best, time.perf_counter() - start)
    return best
