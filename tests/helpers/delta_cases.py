"""A layer of linear attention with random weights, run step by step with any operators."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.kernel_cases import make_inputs
from nanovllm.features.families.qwen3_5.ops import HybridOperators, RowState
from nanovllm.ops.step_inputs import StepInputs

CPU = torch.device("cpu")
EPS = 1e-6


@dataclass(frozen=True)
class DeltaLayer:
    """The sizes and the parameters of a layer; its input is what a projection gives: q, k, v, z, b and a."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    dtype: torch.dtype
    device: torch.device = CPU

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def inputs(self, tokens: int, seed: int = 0) -> Tensor:
        """[tokens, channels + value heads * value dim + 2 * value heads], as the projection lays them out."""
        sizes = self.channels + self.value_heads * (self.value_dim + 2)
        return self.draw(tokens, sizes, seed=seed + 10).to(self.dtype)

    def new_state(self, rows: int) -> RowState:
        """A state full of NaN: a new sequence must not look at it."""
        conv = torch.empty(rows, self.width - 1, self.channels, dtype=self.dtype, device=self.device)
        recurrent = torch.empty(rows, self.value_heads, self.key_dim, self.value_dim, device=self.device)
        return RowState(conv.fill_(float("nan")), recurrent.fill_(float("nan")))

    def run(
        self,
        operators: HybridOperators,
        inputs: Tensor,
        state: RowState,
        step: StepInputs,
        given: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what each of the three operators gives, [tokens, ...]. The second and the third one read what the one
        before gives; or `given`, the results of another run."""
        qkv, z, gates = inputs.split((self.channels, self.value_heads * self.value_dim, 2 * self.value_heads), dim=1)
        weight = self.draw(self.width, self.channels, seed=1).to(self.dtype)
        a_log = self.draw(self.value_heads, seed=2).abs().log()
        dt_bias = self.draw(self.value_heads, seed=3)
        norm = self.draw(self.value_dim, seed=4).to(self.dtype)
        mixed = operators.causal_conv(qkv, weight, state.conv, step)
        delta_inputs = (given[0] if given else mixed, gates, a_log, dt_bias)
        out = operators.gated_delta(*delta_inputs, state.recurrent, step)
        return mixed, out, operators.gated_rms_norm(given[1] if given else out, z, norm, EPS)


def run_in_chunks(
    layer: DeltaLayer, operators: HybridOperators, prompts: Sequence[Tensor], chunk: int, together: bool
) -> list[Tensor]:
    """Take each prompt's inputs [tokens, ...] through the layer, `chunk` tokens a step; return its outputs.

    Prompts take rows in reverse order, all in one batch if `together`.
    """
    state = layer.new_state(len(prompts) + 1)
    outputs: list[list[Tensor]] = [[] for _ in prompts]
    groups = [list(range(len(prompts)))] if together else [[i] for i in range(len(prompts))]
    for group in groups:
        for start in range(0, max(len(prompts[i]) for i in group), chunk):
            present = [i for i in group if start < len(prompts[i])]
            pieces = [prompts[i][start : start + chunk] for i in present]
            lens = [len(piece) for piece in pieces]
            rows = [len(prompts) - 1 - i for i in present]
            step = make_inputs(lens, [start + n for n in lens], rows=rows, device=layer.device)
            *_, out = layer.run(operators, torch.cat(pieces), state, step)
            for i, piece in zip(present, out.split(lens), strict=True):
                outputs[i].append(piece)
    return [torch.cat(pieces) for pieces in outputs]


def assert_delta_is_the_reference(
    layer: DeltaLayer, operators: HybridOperators, steps: Sequence[Sequence[int]], tolerance: float
) -> None:
    """Run steps, whose i-th number is how many tokens sequence i has in it, on both sides; compare all outputs.

    Each operator gets the reference's inputs, so that no rounding of the one before is compared with them.
    """
    reference = HybridOperators(None)
    count = len(steps[0]) if steps else 0
    states = [layer.new_state(count + 1) for _ in range(2)]
    done = [0] * count
    for number, lens in enumerate(steps):
        present = [i for i in range(count) if lens[i]]
        for i in present:
            done[i] += lens[i]
        rows = [count - i for i in present]
        step = make_inputs([lens[i] for i in present], [done[i] for i in present], rows=rows, device=layer.device)
        inputs = layer.inputs(sum(lens), seed=100 * number)
        expected = layer.run(reference, inputs, states[0], step)
        found = layer.run(operators, inputs, states[1], step, expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance)
        assert torch.equal(states[0].conv.nan_to_num(), states[1].conv.nan_to_num())
