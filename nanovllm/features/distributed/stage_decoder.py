"""The decoder of one stage of a pipeline: some of the layers of a model, and what its stage has beside them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.backends import Backend, LayerCache
from nanovllm.features.distributed.stages import Stage
from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.ops.step_inputs import StepInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_stage_decoder(decoder: type[Decoder], stage: Stage) -> type[Decoder]:
    """Return the class of one stage of a model. Its layers keep the numbers that they have in the whole model."""

    class StageDecoder(decoder):  # type: ignore[valid-type, misc]
        """The layers of one stage.

        A stage that is not the last one has no last norm. It returns x + residual, which the next stage takes as its x.
        Without a pipeline the next layer's norm adds the two, and rounds the sum in the same way. So no bit changes.

        Attributes:
            received: [num_tokens, hidden], from the stage before. The runner sets it before each step; the first
                stage embeds the tokens instead.
            elsewhere: prefixes of names of tensors. Other stages read the tensors with these names.
        """

        received: Tensor

        def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
            super().__init__(config, backend, parallel)
            others = [i for i in range(stage.num_layers) if not stage.first <= i < stage.end]
            for i in others:
                delattr(self.layers, str(i))
            absent: dict[str, str] = {f"model.layers.{i}.": "" for i in others}
            if not stage.is_first:
                absent |= {"model.embed_tokens.": "embed_tokens", "lm_head.": "lm_head"}
            if not stage.is_last:
                absent |= {"model.norm.": "norm"}
            for name in filter(None, absent.values()):
                setattr(self, name, None)
            self.elsewhere = tuple(absent)

        def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> Tensor:
            """Compute the hidden states of all tokens, [num_tokens, hidden], as the next stage takes them."""
            x = self.embed_tokens(inputs.token_ids) if stage.is_first else self.received
            residual = None
            for layer, cache in zip(self.layers, caches, strict=True):
                x, residual = layer(x, residual, self.cos_sin, cache, inputs)
            assert residual is not None
            if not stage.is_last:
                return torch.add(x, residual)
            return self.backend.add_rms_norm(x, residual, self.norm, self.eps)[0]  # type: ignore[no-any-return]

    return StageDecoder
