"""Says which tensors of a checkpoint fill which parts of a model, by their names."""

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from nanovllm.models.layers.embedding import LMHead
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, WeightTarget, make_whole_target
from nanovllm.models.model_config import find_renaming
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.models.decoder import Decoder


def find_weight_targets(model: "Decoder", names: Collection[str] = ()) -> NamedTargets:
    """Yield (name in a checkpoint, place to load it to) for every tensor that the model needs.

    Args:
        names: the names in the checkpoint. They show in which of several forms the checkpoint was saved: for
            example, the matrices of all experts may be one tensor, or one tensor for each expert.
    """
    for _, name, target in find_module_targets(model, names):
        yield name, target


def find_module_targets(model: "Decoder", names: Collection[str] = ()) -> Iterator[tuple[str, str, WeightTarget]]:
    """Yield (path of the module here, name in a checkpoint, place to load it to): see `find_weight_targets`.

    The name of a module in a checkpoint is its path here with "model." before it. There are two exceptions. The LM head
    is "lm_head", without "model.". And a module may have a `checkpoint_name`, which replaces the last part of the path.
    A decoder whose checkpoints have other names has a method `find_own_targets`.
    """
    if (find_own := getattr(model, "find_own_targets", None)) is not None:
        yield from find_own(names)
        return
    names_there: dict[str, str] = {}
    for path, module in model.named_modules():
        name_there = names_there[path] = _name_module(path, module, names_there)
        if isinstance(module, LMHead):
            found = iter(()) if model.tied else module.weight_targets("lm_head", names)
        elif isinstance(module, ShardedLayer):
            found = module.weight_targets(name_there, names)
        else:
            found = (
                (f"{name_there}.{name}.weight", make_whole_target(value, model.layer_class.norm_plus))
                for name, value in module.named_parameters(recurse=False)
            )
        for name, target in found:
            yield path, name, target


def _name_module(path: str, module: nn.Module, names_there: dict[str, str]) -> str:
    """Return the name that a module has in a checkpoint.

    Args:
        names_there: {path of a module: its name in a checkpoint}, with the module's parent.
    """
    if not path:
        return "model"
    parent, _, own = path.rpartition(".")
    return f"{names_there[parent]}.{getattr(module, 'checkpoint_name', own)}"


def find_elsewhere(model: "Decoder") -> tuple[str, ...]:
    """Return prefixes of the names of tensors that other ranks read: a stage of a pipeline has only some layers."""
    elsewhere: tuple[str, ...] = getattr(model, "elsewhere", ())
    return elsewhere


def name_canonically(names: Iterable[str], config: "PretrainedConfig | None" = None) -> dict[str, str]:
    """Return {name: the name that the model knows it by}, by the rule of its family: see `name_like_llama`."""
    rename = name_like_llama if config is None else find_renaming(config)
    return rename(list(names), config)


def name_like_llama(names: list[str], _: Any = None) -> dict[str, str]:
    """Return {name: the name that the model knows it by}, which begins with "model.", except for the LM head.

    The names of a checkpoint without an LM head lack this beginning. If a checkpoint has other parts, such as one for
    pictures, "language_model." comes after it.

    Raises:
        ValueError: two names stand for one tensor of the model, so nobody can know which one is meant.
    """
    prefix = "" if any(name.startswith("model.") for name in names) else "model."
    canonical = {name: name if name.startswith("lm_head.") else prefix + name for name in names}
    canonical = {name: own.replace("model.language_model.", "model.", 1) for name, own in canonical.items()}
    first: dict[str, str] = {}
    for name, own in canonical.items():
        if first.setdefault(own, name) != name:
            raise ValueError(f"the checkpoint has {own} twice, as {quote(first[own])} and as {quote(name)}: remove one")
    return canonical


def name_some(names: Iterable[str]) -> str:
    """Return the first five of the names, and how many more there are, for an error message."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
