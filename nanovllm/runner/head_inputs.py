"""The values that the first part of a step hands to the second: from the layers to the LM head and the sampler."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import StepPlan


class HeadInputs(NamedTuple):
    """The results of a step's layers, and all else that its second part needs.

    `ModelRunner.launch` runs the second part directly after the first. In a pipeline other steps begin between the two
    parts, and a row may have a new owner by then: `sampling` and `target_indices` are for pipelines.

    Attributes:
        asked: ROW_SAMPLING [num_seqs], what each sequence of the plan asks for.
        hidden: [num_tokens, hidden], the hidden states.
        targets: int32 [num_scored in all], on the device.
        sample_indices: int [n], the index in `hidden` that each sample needs; None if sample i needs index i.
        rows: int32 [n], the row of the device's tables that gets each sample.
        positions: int32 [n], for each sampled token its index in its sequence.
        sampling: int32 [n, width], the packed sampling values of each sample, if a row may have a new owner when they
            are needed; None if the device's table still has them.
        target_indices: [len(targets)], the index in `hidden` that each target needs; None if `hidden` has all tokens of
            the step.
    """

    plan: StepPlan
    asked: NDArray[Any]
    hidden: Tensor
    targets: Tensor
    sample_indices: Tensor | None
    rows: Tensor
    positions: Tensor
    sampling: Tensor | None = None
    target_indices: NDArray[np.intp] | None = None
