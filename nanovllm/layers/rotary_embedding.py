"""The table of rotary angles; scalings come from transformers' own initialisation functions."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def rotary_table(config: "PretrainedConfig", num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: head_dim/2 cosines, then head_dim/2 sines, of each position's angles."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    with torch.device("cpu"):  # in float32 of the host's, wherever the model is made
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            frequencies, scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
        return torch.cat((angles.cos(), angles.sin()), dim=1) * scaling
