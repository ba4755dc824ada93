"""The values that the first part of a step hands to the second: from the layers to the LM head and the sampler."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import StepPlan


class HeadInputs(NamedTuple):
    """The results of a step's layers, and which of them give scores and samples.

    Attributes:
        hidden: [n, hidden], the hidden states; in most steps those of all tokens.
        target_indices: [len(plan.targets)], the index in `hidden` that each target needs; None if there are no targets.
        sample_indices: int [num_samples], the index in `hidden` that each sample needs; None if sample i needs index i.
        rows: int32 [num_samples], the row of the device's tables that gets each sample.
        positions: int32 [num_samples], for each sampled token its index in its sequence.
    """

    plan: StepPlan
    hidden: Tensor
    target_indices: NDArray[np.intp] | None
    sample_indices: Tensor | None
    rows: Tensor
    positions: Tensor
