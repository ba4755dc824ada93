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
from torch.overrides import TorchFunctionMode

from nanovllm.features.families.any_causal.attend import HARMLESS, TRIAL, AttentionLayer
from nanovllm.features.families.any_causal.layers import STACKS, Linear, Norm, Stack, Swap
from nanovllm.ops.norm_rope_store import NormRope, rope_reference
from nanovllm.ops.rms_norm import rms_norm_reference

FIRST_ARGUMENTS = ["self", "hidden_states", "position_embeddings"]
"""The arguments with which a module's `forward` begins. `WholeAttention` begins with them, too."""

OTHER_ARGUMENTS = frozenset(("attention_mask", "cache", "past_key_values", "cache_position", "use_cache", "kwargs"))
"""The other arguments that `forward` may name. They change nothing here: the dry run asks a mask what it shows."""

GIVEN = HARMLESS | {"attention_mask"}
"""The arguments that a layer may give to its module. A module that gets another one stays theirs."""

NORMS = ("q_norm", "k_norm")
"""The names of norms of heads."""

NUM_TOKENS = 5
"""The tokens of a trial."""

HIDDEN = 16
"""The elements of a trial's inputs."""

NUM_HEADS = (4, 2, 2)
"""The heads of queries, keys and values in a trial."""

FAR_POSITIONS = torch.tensor([[3, 70, 1000, 40_000, 1 << 20]], device="cpu")
POSITIONS = {"position_ids": FAR_POSITIONS, "cache_position": FAR_POSITIONS[0]}
"""The positions that a trial's tokens get: a scale may begin at any of them."""


class WholeAttention:
    """Stands in the place of a module's `forward`.

    It calls theirs in the dry run, beside transformers' own attention, and where the engine's operator cannot take the
    heads: see `AttentionLayer.has_plain_heads`.

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
        self._norms: list[Any] = [module.get_submodule(name) for name in NORMS if hasattr(module, name)]
        self._gets_more = False  # than the trial gave it

    def __call__(self, hidden_states: Tensor, position_embeddings: Any, *others: Any, **named: Any) -> Any:
        """hidden_states [1, num_tokens, hidden] -> (the same shape, None)."""
        module = self._module
        layer: AttentionLayer | None = module.__dict__.get("nanovllm_layer")
        if layer is None:  # the dry run
            given = {name for name, value in named.items() if value is not None}
            self._gets_more = self._gets_more or bool(others) or not given <= GIVEN
        if layer is None or self._gets_more or not layer.has_plain_heads(position_embeddings):
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
        found = swap.try_once(find_whole, module) if has_known_parts(module) else None
        if found is not None:
            module.forward = WholeAttention(module, *found)


class NoPositions(TorchFunctionMode):
    """Within, nobody counts tokens: a step's first token is not the first of its sequence."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.arange:
            raise ValueError("the module makes positions of its own")
        return function(*args, **(kwargs or {}))


def has_known_parts(module: nn.Module) -> bool:
    """Return whether a module has the parameters and arguments of one that may be computed as a whole."""
    parts = dict(module._modules)
    norms = [parts.pop(name) for name in NORMS if name in parts]
    if set(parts) != {"qkv_proj", "o_proj"} or module._parameters:
        return False
    names = list(inspect.signature(type(module).forward).parameters)
    if names[:3] != FIRST_ARGUMENTS or not OTHER_ARGUMENTS.issuperset(names[3:]):
        return False
    if not isinstance(parts["qkv_proj"], Stack) or not isinstance(parts["o_proj"], Linear):
        return False
    own_eps = {norm.eps for norm in norms if isinstance(norm, Norm)}
    are_ours = all(isinstance(norm, Norm) for norm in norms)
    return not norms or (len(norms) == 2 and are_ours and len(own_eps) == 1)


def find_whole(module: nn.Module) -> tuple[float, bool] | None:
    """Try a module whose layers are ours. Return `scale` and `rotates`; None if it computes anything else.

    In a step it may get positions, and must compute the same as without them: positions are in the angles.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    trial = _make_trial(module, draw)
    x = draw(NUM_TOKENS, HIDDEN) * torch.logspace(-2, 3, NUM_TOKENS)[:, None]  # partly large: some modules clamp
    angles = draw(NUM_TOKENS, trial.head_dim // 2)
    without = _compare(trial, x, angles)
    return without if without == _compare(trial, x, angles, **POSITIONS) else None


def _compare(trial: Any, x: Tensor, angles: Tensor, **positions: Tensor) -> tuple[float, bool] | None:
    """Run a trial's `forward` once: see `find_whole`."""
    cos, sin = (part.repeat(1, 2)[None] for part in (angles.cos(), angles.sin()))
    with NoPositions():
        y = type(trial).forward(trial, x[None], (cos, sin), attention_mask=None, **positions)
    *kept, named = trial.kept
    if named.get("s_aux") is not None:
        return None
    table = torch.cat((angles.cos(), angles.sin()), 1)
    for rotates in (True, False):
        ours = _compute(trial, x, table if rotates else None)
        theirs = (*kept, y[0][0])
        if all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(theirs, ours, strict=True)):
            return float(named["scaling"]), rotates
    return None


def _make_trial(module: nn.Module, draw: Any) -> Any:
    """Return a copy of a module with small random matrices. Its attention is `keep` of attend.py."""
    own: Any = module
    trial: Any = copy.copy(module)
    trial._modules = {}
    trial.config = copy.copy(own.config)
    trial.config._attn_implementation_internal = TRIAL

    def make_matrix(rows: int, columns: int, bias: Tensor | None) -> Any:
        return partial(F.linear, weight=draw(rows, columns), bias=None if bias is None else draw(rows))

    for name, heads in zip(STACKS["qkv_proj"], NUM_HEADS, strict=True):
        setattr(trial, name, make_matrix(heads * own.head_dim, HIDDEN, own.qkv_proj.bias))
    trial.o_proj = make_matrix(HIDDEN, NUM_HEADS[0] * own.head_dim, own.o_proj.bias)
    for name in NORMS:
        if hasattr(module, name):
            norm = partial(rms_norm_reference, weight=draw(own.head_dim), eps=getattr(own, name).eps)
            setattr(trial, name, norm)
    return trial


def _compute(trial: Any, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what the engine's operators would: queries, keys, values, and the output if attention gives the queries.

    Args:
        table: the angles of each token; None rotates nothing.
    """
    q, k, v = (getattr(trial, name)(x).view(NUM_TOKENS, -1, trial.head_dim) for name in STACKS["qkv_proj"])
    if hasattr(trial, "q_norm"):
        q = trial.q_norm(q)
        k = trial.k_norm(k)
    if table is not None:
        rows = torch.arange(NUM_TOKENS)
        q = rope_reference(q, table, rows)
        k = rope_reference(k, table, rows)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), trial.o_proj(q.flatten(1))
