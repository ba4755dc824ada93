"""Attention modules of transformers' that the engine's operators compute as a whole: projections, norms and rotation.

Between its matrices and its attention a module usually norms heads, or not, and rotates their halves. The engine has
one operator for that, which also stores keys and values. A trial on random numbers says whether a module is of this
kind. The code of any other module stays transformers' own.
"""

import copy
import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.features.families.any_causal.attend import TRIAL, AttentionLayer
from nanovllm.features.families.any_causal.layers import STACKS, Linear, Norm, Stack, Swap
from nanovllm.ops.norm_rope_store import NormRope, rope_reference
from nanovllm.ops.rms_norm import rms_norm_reference

FIRST_ARGUMENTS = ["self", "hidden_states", "position_embeddings"]
"""The arguments with which a module's `forward` begins. `WholeAttention` begins with them, too."""


class WholeAttention:
    """Stands in the place of a module's `forward`. In the dry run and in the proof it calls theirs.

    Attributes:
        scale: what scores are multiplied by.
        rotates: whether the module rotates queries and keys.
    """

    def __init__(self, module: nn.Module, scale: float, rotates: bool) -> None:
        self.scale = scale
        self.rotates = rotates
        self._module = module
        self._qkv_proj: Any = module.get_submodule("qkv_proj")
        self._o_proj: Any = module.get_submodule("o_proj")
        self._norms: list[Any] = [module.get_submodule(name) for name in ("q_norm", "k_norm") if hasattr(module, name)]

    def __call__(self, hidden_states: Tensor, position_embeddings: Any, *others: Any, **named: Any) -> Any:
        """hidden_states [1, num_tokens, hidden] -> (the same shape, None)."""
        module = self._module
        layer: AttentionLayer | None = module.__dict__.get("nanovllm_layer")
        if layer is None or not layer.has_plain_heads(position_embeddings):
            return type(module).forward(module, hidden_states, position_embeddings, *others, **named)
        step = layer.step
        norms = step.norms[layer.stored_dim]
        positions = step.origin
        if self.rotates:
            table, positions = step.find_angles(*position_embeddings)
            norms = norms._replace(cos_sin=table)
        if self._norms:
            q_norm, k_norm = self._norms
            norms = NormRope(q_norm.weight, k_norm.weight, q_norm.eps, norms.cos_sin)
        q = layer.store(self._qkv_proj.forward(hidden_states[0]), norms, positions)
        attended = layer.read(q, self.scale)
        return self._o_proj.forward(attended.flatten(1))[None], None


def take_whole(model: nn.Module, swap: Swap) -> None:
    """Compute all attention modules of a model as a whole that can be."""
    for module in list(model.modules()):
        found = swap.try_once(find_whole, module)
        if found is not None:
            module.forward = WholeAttention(module, *found)


def find_whole(module: nn.Module) -> tuple[float, bool] | None:
    """Try a module whose layers are ours. Return `scale` and `rotates`; None if it computes anything else.

    x is partly large, because some modules clamp what they compute.
    """
    if not _has_known_parts(module):
        return None
    own: Any = module
    has_norms = hasattr(module, "q_norm")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    trial: Any = copy.copy(module)
    trial._modules = {}
    trial.config = copy.copy(own.config)
    trial.config._attn_implementation_internal = TRIAL
    dim = int(own.head_dim)
    x = draw(5, 16) * torch.logspace(-2, 3, 5)[:, None]
    angles = draw(5, dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    projected = []
    for name, heads in zip(STACKS["qkv_proj"], (4, 2, 2), strict=True):
        matrix = (draw(heads * dim, 16), None if own.qkv_proj.bias is None else draw(heads * dim))
        setattr(trial, name, partial(F.linear, weight=matrix[0], bias=matrix[1]))
        projected.append(F.linear(x, *matrix).view(5, heads, dim))
    q, k, v = projected
    if has_norms:
        weights = draw(dim), draw(dim)
        q, k = (rms_norm_reference(h, w, own.q_norm.eps) for h, w in zip((q, k), weights, strict=True))
        for name, weight in zip(("q_norm", "k_norm"), weights, strict=True):
            setattr(trial, name, partial(rms_norm_reference, weight=weight, eps=own.q_norm.eps))
    out = (draw(16, 4 * dim), None if own.o_proj.bias is None else draw(16))
    trial.o_proj = partial(F.linear, weight=out[0], bias=out[1])
    cos, sin = (part.repeat(1, 2)[None] for part in table.chunk(2, 1))
    y = type(module).forward(trial, hidden_states=x[None], position_embeddings=(cos, sin), attention_mask=None)
    *kept, named = trial.kept
    for rotates in (True, False):
        rows = torch.arange(5)
        own_q, own_k = (rope_reference(h, table, rows) if rotates else h for h in (q, k))
        ours = (*(h.transpose(0, 1) for h in (own_q, own_k, v)), F.linear(own_q.flatten(1), *out))
        if all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip((*kept, y[0][0]), ours, strict=True)):
            return (float(named["scaling"]), rotates) if named.get("s_aux") is None else None
    return None


def _has_known_parts(module: nn.Module) -> bool:
    """Return whether a module has the parameters, and the first arguments, of one that may be computed as a whole."""
    parts = dict(module._modules)
    norms = [parts.pop(name) for name in ("q_norm", "k_norm") if name in parts]
    first = list(inspect.signature(type(module).forward).parameters)[: len(FIRST_ARGUMENTS)]
    if set(parts) != {"qkv_proj", "o_proj"} or module._parameters or first != FIRST_ARGUMENTS:
        return False
    if not isinstance(parts["qkv_proj"], Stack) or not isinstance(parts["o_proj"], Linear):
        return False
    own_eps = {norm.eps for norm in norms if isinstance(norm, Norm)}
    are_ours = all(isinstance(norm, Norm) for norm in norms)
    return not norms or (len(norms) == 2 and are_ours and len(own_eps) == 1)
