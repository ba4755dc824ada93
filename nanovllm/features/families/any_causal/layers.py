"""Layers of ours in the places of transformers'. A trial on random numbers says whether one computes the same.

What no trial recognises stays transformers' code.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends import Backend
from nanovllm.models.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.models.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, make_whole_target
from nanovllm.ops.rms_norm import rms_norm_reference
from nanovllm.utils.machine import default_dtype

T = TypeVar("T")

STACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""{name of a matrix of ours: the matrices of a module that are stacked in it}."""

ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
"""The names of matrices that choose experts. They are never quantised: a small error chooses others."""

MOST_COPIED_EXPERTS = 8
"""The most experts of a mixture that transformers' own code computes. It copies matrices for each pair."""


class Linear(RowParallelLinear):
    """A matrix on one rank, for x with any number of dimensions.

    Attributes:
        is_router: whether it chooses experts.
    """

    def __init__(self, like: nn.Linear, name: str) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None, Parallel(), name)
        self.out_features = like.out_features
        self.is_router = name in ROUTERS

    def list_matrices(self) -> tuple[nn.Parameter, ...]:
        return () if self.is_router else super().list_matrices()

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.reshape(-1, x.shape[-1]), self.bias).view(*x.shape[:-1], -1)


class Stack(ColumnParallelLinear):
    """Matrices that a module multiplies by the same x."""

    def __init__(self, matrices: Sequence[nn.Linear], names: Sequence[str]) -> None:
        self.sizes = [matrix.out_features for matrix in matrices]
        parts = [Part(name, size, 0, size) for name, size in zip(names, self.sizes, strict=True)]
        super().__init__(matrices[0].in_features, parts, matrices[0].bias is not None)


@dataclass
class LastProduct:
    """The product of all matrices of a stack with x, as long as some of them have not been asked for theirs."""

    x: Tensor | None = None
    parts: Sequence[Tensor] = ()
    num_left: int = 0


class Share:
    """Stands in a module's place of one matrix of a stack. The first call multiplies all of them, and keeps the result.

    A call with another tensor multiplies again. So each call gets its own product, in whatever order calls come.
    """

    def __init__(self, stack: Stack, number: int, last: LastProduct) -> None:
        """
        Args:
            last: what the shares of a stack have in common.
        """
        self.in_features = stack.weight.shape[1]
        self.out_features = stack.sizes[number]
        self._stack = stack
        self._number = number
        self._last = last

    def __call__(self, x: Tensor) -> Tensor:
        last = self._last
        if last.x is not x:
            stack = self._stack
            y = stack.forward(x.reshape(-1, x.shape[-1]))
            last.parts = y.view(*x.shape[:-1], -1).split(stack.sizes, -1)  # type: ignore[no-untyped-call]
            last.x = x
            last.num_left = len(last.parts)
        part = last.parts[self._number]
        last.num_left -= 1
        if not last.num_left:
            last.x = None
            last.parts = ()
        return part


class Norm(ShardedLayer):
    """RMSNorm of the last dimension. Where theirs multiplies by 1 + weight, `plus` is 1, and added when it is read."""

    def __init__(self, like: nn.Module, plus: float, backend: Backend) -> None:
        super().__init__()
        self.size = len(like.get_parameter("weight"))
        self.eps = find_eps(like)
        self.plus = plus
        self.backend = backend
        dtype = torch.float32 if plus else None
        self.weight = nn.Parameter(torch.empty(self.size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.size).contiguous()  # x may be a part of a wider tensor
        y = self.backend.rms_norm(rows, self.weight, self.eps)
        return y.view_as(x)  # four times as fast as view(x.shape)

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        yield f"{path}.weight", make_whole_target(self.weight, self.plus)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), with the two operators in one."""

    def __init__(self, stack: Stack, down: Linear, backend: Backend) -> None:
        super().__init__()
        self.gate_up_proj = stack
        self.down_proj = down
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj.multiply(x.reshape(-1, x.shape[-1]))
        return self.down_proj.multiply(self.backend.silu_and_mul(gate_up)).view_as(x)


class Embedding(VocabParallelEmbedding):
    """Rows of the vocabulary, multiplied by `scale`."""

    def __init__(self, like: nn.Embedding, scale: float | None) -> None:
        super().__init__(like.num_embeddings, like.embedding_dim, Parallel())
        self.num_embeddings = like.num_embeddings
        self.embedding_dim = like.embedding_dim
        self.padding_idx = like.padding_idx
        # transformers rounds the factor to the model's dtype.
        rounded = None if scale is None else torch.tensor(scale, dtype=self.weight.dtype, device="cpu").item()
        self.scale: float | None = rounded

    def forward(self, token_ids: Tensor) -> Tensor:
        x = super().forward(token_ids.reshape(-1)).view(*token_ids.shape, -1)
        return x if self.scale is None else x * self.scale


class Head(LMHead):
    """The LM head. Some have a bias."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.out_features, like.in_features, Parallel())
        self.out_features = like.out_features
        self.in_features = like.in_features
        self.bias = None
        if like.bias is not None:
            self.bias = nn.Parameter(torch.empty(like.out_features), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden.reshape(-1, hidden.shape[-1]))
        assert logits is not None
        logits = logits if self.bias is None else logits + self.bias
        return logits.view(*hidden.shape[:-1], -1)

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        yield from super().weight_targets(path, names)
        if self.bias is not None:
            yield f"{path}.bias", make_whole_target(self.bias)


# ---- trials


def find_eps(module: nn.Module) -> float:
    """Return what a norm adds to the mean of squares; -1 if it does not say."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else -1.0


def may_be_norm(module: nn.Module) -> bool:
    """Return whether a module has what a norm has."""
    own = dict(module.named_parameters(recurse=False))
    return set(own) == {"weight"} and own["weight"].dim() == 1 and not module._modules and find_eps(module) >= 0


def find_plus(module: nn.Module) -> float | None:
    """Return what is added to the weight of a module that computes our RMSNorm, 0 or 1; None if it does not."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(64, generator=generator)
    x = torch.randn(6, 64, generator=generator) * torch.logspace(-3, 2, 6)[:, None]  # eps matters where x is small
    for plus in (0.0, 1.0):
        if all(_is_norm(module, weight.to(dtype), x.to(dtype), plus) for dtype in (torch.float32, torch.bfloat16)):
            return plus
    return None


def _is_norm(module: nn.Module, weight: Tensor, x: Tensor, plus: float) -> bool:
    trial = copy.copy(module)
    trial._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    own_weight = weight.float() + plus if plus else weight
    return torch.equal(trial(x), rms_norm_reference(x, own_weight, find_eps(module)))


SWIGLU = ("gate_proj", "up_proj", "down_proj")
"""The names of the matrices of an MLP with a gate."""


def may_be_swiglu(module: nn.Module) -> bool:
    """Return whether a module has the parameters of an MLP with a gate."""
    matrices = {name: getattr(module, name, None) for name in SWIGLU}
    if any(type(matrix) is not nn.Linear or matrix.bias is not None for matrix in matrices.values()):
        return False
    return {name.partition(".")[0] for name, _ in module.named_parameters()} == set(SWIGLU)


def is_swiglu(module: nn.Module) -> bool:
    """Return whether a module computes down(silu(gate(x)) * up(x))."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(24, 16, generator=generator) for _ in range(2))
    down = torch.randn(16, 24, generator=generator)
    x = torch.randn(1, 5, 16, generator=generator) * torch.logspace(-1, 2, 5)[:, None]  # large: some MLPs clamp
    trial = copy.copy(module)
    trial._modules = dict(module._modules)
    for name, weight in zip(SWIGLU, (gate, up, down), strict=True):
        rows, columns = weight.shape
        linear = nn.Linear(columns, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        setattr(trial, name, linear)
    own = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    y = trial(x)
    return isinstance(y, Tensor) and torch.allclose(y, own, rtol=1e-4, atol=1e-4)


def find_scale(module: nn.Embedding) -> float | None:
    """Return by what an embedding multiplies its rows; None for nothing. ValueError if it does anything else."""
    trial = copy.copy(module)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    trial._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    trial.padding_idx = None
    ids = torch.arange(8)
    y = trial(ids)
    if torch.equal(y, weight):
        return None
    scale = float(y[0, 0] / weight[0, 0])
    stated = getattr(module, "embed_scale", None)
    scale = float(stated) if stated is not None else scale
    if not torch.allclose(y, weight * scale):
        raise ValueError(f"its embedding ({type(module).__name__}) is not a table of rows")
    return scale


TORCHS = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
"""The attributes by which torch keeps hooks and the like, which say nothing of what a module computes."""


class Same:
    """Stands for an object in a description. It equals itself alone, and is kept, so that no other gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def describe(value: Any) -> Hashable:
    """Return what a module, or a value in it, computes by: its classes, its settings, and those of all modules in it.

    Modules with equal descriptions compute the same with the same parameters. Of these the shapes count alone.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | type):
        return type(value), repr(value)  # NaN equals itself, and 1 is not True
    if isinstance(value, nn.Module):
        own = {name: part for name, part in vars(value).items() if name not in TORCHS}
        return type(value), describe(own)
    if isinstance(value, dict):
        return tuple((describe(name), describe(own)) for name, own in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(describe, value))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(describe, value))
    if isinstance(value, Tensor) and value.is_meta:
        return value.shape, value.dtype
    return Same(value)


class Swap:
    """Puts our layers in the places of transformers', below a module."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._results: dict[Any, Any] = {}

    def try_once(self, trial: Callable[[nn.Module], T], module: nn.Module) -> T | None:
        """Return the result of a trial; None if it fails. Modules that are alike are tried once.

        transformers' modules may fail with any error on numbers that they were not made for.
        """
        key = (trial, describe(module))
        if key not in self._results:
            with torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
                try:
                    self._results[key] = trial(module)
                except Exception:
                    self._results[key] = None
        found: T | None = self._results[key]
        return found

    def swap_children(self, parent: nn.Module) -> None:
        """Put our layers in the places of all of a module's children, and of theirs."""
        for stack_name, names in STACKS.items():
            self._stack(parent, stack_name, names)
        for name, child in list(parent.named_children()):
            if isinstance(child, ShardedLayer):
                continue
            new = self._make(child, name)
            if new is None:
                self.swap_children(child)
            else:
                setattr(parent, name, new)

    def _make(self, module: nn.Module, name: str) -> nn.Module | None:
        """Return our layer for a module of theirs; None if there is none."""
        if type(module) is nn.Linear:
            return Linear(module, name)
        if hasattr(module, "is_concatenated") and hasattr(module, "num_experts"):
            from nanovllm.features.families.any_causal.experts import GroupedExperts, is_mixture

            if self.try_once(is_mixture, module):
                return GroupedExperts(module, self._backend)
            if int(module.num_experts) > MOST_COPIED_EXPERTS:  # type: ignore[arg-type]
                raise ValueError(
                    f"its mixture of {module.num_experts} experts ({type(module).__name__}) is none that the grouped "
                    f"kernels compute, and without them more than {MOST_COPIED_EXPERTS} experts take too much memory"
                )
        if may_be_swiglu(module) and self.try_once(is_swiglu, module):
            names = STACKS["gate_up_proj"]
            down = Linear(module.get_submodule("down_proj"), "down_proj")  # type: ignore[arg-type]
            return SwiGLU(Stack([getattr(module, part) for part in names], names), down, self._backend)
        plus = self.try_once(find_plus, module) if may_be_norm(module) else None
        return None if plus is None else Norm(module, plus, self._backend)

    def _stack(self, parent: nn.Module, stack_name: str, names: tuple[str, ...]) -> None:
        """Put one stack behind several matrices of a module, if they can be multiplied by the same x."""
        matrices = [getattr(parent, name, None) for name in names]
        found = [matrix for matrix in matrices if type(matrix) is nn.Linear]
        are_alike = len({(matrix.in_features, matrix.bias is None) for matrix in found}) == 1
        if len(found) < len(names) or not are_alike or hasattr(parent, stack_name):
            return
        if stack_name == "gate_up_proj" and may_be_swiglu(parent) and self.try_once(is_swiglu, parent):
            return
        stack = Stack(found, names)
        setattr(parent, stack_name, stack)
        last = LastProduct()
        for number, name in enumerate(names):
            delattr(parent, name)  # its place is for modules alone
            setattr(parent, name, Share(stack, number, last))


def list_leaves(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have no modules in them."""
    return [module for module in model.modules() if not any(module.children())]
