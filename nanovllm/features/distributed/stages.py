"""Chooses which layers each stage of a pipeline computes, and which rows the next step may compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.rows import Rows, RowTable
from nanovllm.models.sizes import Sizes
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Stage:
    """The layers that one rank of a pipeline computes: `first` to `end` - 1 of the model's `num_layers`.

    The first stage also has the embedding and the LM head. The last one also has the final norm.
    """

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers


class StageSpan(NamedTuple):
    """A span of time of one rank of a pipeline.

    Attributes:
        name: "layers" or "head" while it computes, "receive" while it waits for another rank.
        plan: the number of the plan. From `FirstStage.take_spans` it counts from the plan that was read last: 1 is the
            next one.
        start, seconds: by `time.perf_counter`, which all processes of a machine share.
    """

    rank: int
    name: str
    plan: int
    start: float
    seconds: float


def split_layers(layer_weights: Sequence[int], head_weight: int, num_stages: int) -> list[Stage]:
    """Split the layers of a model so that the heaviest stage is as light as possible; each stage gets at least one.

    Args:
        layer_weights: the weight of each layer, for example its bytes.
        head_weight: the weight of the LM head, which the first stage computes beside its layers.
        num_stages: at most as many as there are layers.
    """
    num_layers = len(layer_weights)
    # lightest[n] is (weight of the heaviest stage, ends of the stages) of the best split of the first n layers.
    lightest = {n: (head_weight + sum(layer_weights[:n]), [n]) for n in range(1, num_layers + 1)}
    for _ in range(1, num_stages):
        lightest = {
            n: min(
                (max(heaviest, sum(layer_weights[before:n])), [*ends, n])
                for before, (heaviest, ends) in lightest.items()
                if before < n
            )
            for n in range(min(lightest) + 1, num_layers + 1)
        }
    ends = lightest[num_layers][1]
    return [Stage(first, end, num_layers) for first, end in zip([0, *ends], ends, strict=False)]


def choose_stages(hf_config: "PretrainedConfig", num_stages: int) -> list[Stage]:
    """Return the stages of a model, split by the number of their parameters.

    The LM head counts a quarter. Only rows that want logits are multiplied with it: all of a decode, few of a prompt.
    So it counts as in a job that reads three tokens for each that it writes.

    Raises:
        ValueError: the model has fewer layers than stages.
    """
    num_layers: int = hf_config.num_hidden_layers
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {num_stages}, and the model has {num_layers} layers: set it to at most that"
        )
    layers = Sizes(hf_config).model.layers
    weights = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return split_layers(weights, hf_config.vocab_size * hf_config.hidden_size // 4, num_stages)


def choose_ready(table: RowTable, num_stages: int, is_on_device: NDArray[np.bool_]) -> Rows:
    """Choose the running rows that the next step of a pipeline may compute; return them in order of admission.

    A sequence's next token is computed after its last one is sampled. So each of the steps that keep the stages busy
    leaves some running sequences to the others, and more than one prompt may be unfinished.

    A row whose next token is in flight waits until the host has read it, or until the device is sure to have it when
    the next step begins. Of the rows that need one token, a step takes at most ceil(running / stages). With more, all
    rows could be in one step, and only one stage would work.

    Args:
        table: the scheduler's table.
        num_stages: how many steps in flight keep all stages busy.
        is_on_device: by row, whether a token that the host has not read is on the device when the next step begins.
    """
    rows = table.order
    num_left = np.minimum(table.num_tokens[rows], table.num_needed[rows]) - table.num_computed[rows]
    is_known = table.num_known[rows] == table.num_tokens[rows]
    is_ready = (is_known | is_on_device[rows]) & (num_left > 0)
    decodes = is_ready & (num_left == 1)
    is_ready &= ~decodes | (decodes.cumsum() <= ceil_div(len(rows), num_stages))
    ready: Rows = rows[is_ready]
    return ready
