"""Fills a model from safetensors, and proves that every parameter was filled."""

import logging
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import Quantizer, WeightTarget
from nanovllm.models.model_config import find_ends
from nanovllm.models.model_folder import ModelFolder
from nanovllm.models.weight_names import find_elsewhere, find_weight_targets, name_canonically, name_some
from nanovllm.utils.progress import hide_unless

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

READ_AHEAD = 4 << 30
"""Bytes that a fast disk reads while Python imports."""


class Merger(Protocol):
    """Changes the tensors of a checkpoint while they are read: an adapter."""

    def check_names(self, names: Collection[str]) -> None:
        """Raise a ValueError unless the model has, by these names, all tensors that are to be changed."""

    def merge(self, name: str, source: Any) -> Any:
        """Return the tensor or slice object that is read in the place of `source`."""


def allocate(model: Decoder, device: torch.device, but: Iterable[nn.Parameter] = ()) -> None:
    """Give memory on a device to the parameters of a model that was made on the meta device.

    Args:
        but: parameters that stay on the meta device.
    """
    left = {id(value) for value in but}
    memory: dict[int, nn.Parameter] = {}  # embedding and LM head may share a parameter
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if id(value) not in left:
                if id(value) not in memory:
                    memory[id(value)] = materialize(value, device)
                setattr(module, name, memory[id(value)])


def materialize(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter on the device like one on the meta device. Rows of padding are zero."""
    padding = getattr(parameter, "padding", None)
    make = torch.zeros if padding else torch.empty
    made = nn.Parameter(make(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)
    if padding is not None:
        made.padding = padding  # type: ignore[attr-defined]
    return made


def read_ahead(files: Iterable[Path]) -> None:
    """Have the operating system read files into its cache, in a thread that nobody waits for. Errors are ignored.

    It sends the files to /dev/null, which copies nothing and does not hold Python's lock.
    """

    def read() -> None:
        left = READ_AHEAD
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            for path in files:
                with path.open("rb") as file:
                    at = 0
                    while sent := os.sendfile(nowhere.fileno(), file.fileno(), at, left):
                        at += sent
                        left -= sent

    Thread(target=read, daemon=True, name="read ahead").start()


def load_weights(
    model: Decoder,
    parallel: Parallel,
    quantizer: Quantizer | None,
    *,
    config: "PretrainedConfig",
    folder: ModelFolder,
    unread: tuple[str, ...],
    adapter: Merger | None = None,
) -> None:
    """Fill the model from the folder's safetensors, one tensor at a time. Each rank reads only its own share.

    Args:
        quantizer: quantises matrices as they are read.
        config: the model's configuration.
        folder: the checkpoint's. It is read again if its files have changed, as they may while an engine sleeps.
        unread: prefixes of names of tensors that no model of the family reads.
        adapter: is merged into the weights as they are read.

    Raises:
        ValueError: a file cannot be read, or a tensor is missing, unexpected, in two files, or of another shape.
    """
    show_progress = parallel.rank == 0
    folder = folder.refresh()
    canonical = name_canonically(folder.places, config)
    found = set(canonical.values())
    targets: dict[str, list[WeightTarget]] = {}
    all_targets = find_weight_targets(model, found) if quantizer is None else quantizer.find_targets(model, found)
    for name, target in all_targets:
        targets.setdefault(name, []).append(target)
    _check_cover(model, chain.from_iterable(targets.values()))
    if missing := targets.keys() - found:
        raise ValueError(f"{folder} lacks {len(missing)} tensors: {name_some(missing)}")
    unread_here = {name for name in found if name.startswith(unread)}
    if unread_here and show_progress:
        logger.info("%s: %d tensors are not read: %s", folder, len(unread_here), name_some(unread_here))
    # Tensors that this rank need not read: no model reads them, or another rank does.
    elsewhere = unread_here.union(name for name in found if name.startswith(find_elsewhere(model)))
    head, _ = find_ends(config)
    leftovers = found - targets.keys() - elsewhere - {head}  # some checkpoints hold a tied head, too
    if leftovers:
        from nanovllm.models.leftovers import check_leftovers

        own = {name: path for name, path in folder.places.items() if canonical[name] in leftovers}
        # A ValueError, unless each of them is known to change nothing.
        check_leftovers(own, canonical, targets, config, folder)
        if show_progress:
            logger.info("%s: %d tensors change nothing: %s", folder, len(leftovers), name_some(leftovers))
    if adapter is not None:
        adapter.check_names(targets.keys() | elsewhere)
    copy = model.backend.make_copier()
    files = folder.files
    for path in tqdm(files, desc="Loading weights", unit="file", **hide_unless(show_progress and len(files) > 1)):
        with folder.open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                parallel.raise_failure()
                source = file.get_slice(name)
                if adapter is not None:
                    source = adapter.merge(canonical[name], source)
                for target in targets.get(canonical[name], ()):
                    _fill(target, source, f"{path}: tensor {name}", copy)


def _fill(target: WeightTarget, source: Any, what: str, copy: Callable[[Tensor, Tensor], object]) -> None:
    dtype = source.get_dtype()
    if dtype not in target.dtypes:
        raise ValueError(f"{what} is {dtype}; config.json asks for one of {', '.join(target.dtypes)}")
    shape = source.get_shape()
    if not target.fits(shape):
        raise ValueError(f"{what} has shape {list(shape)}; config.json asks for {list(target.shape)}")
    target.fill(source, copy)


def _check_cover(model: Decoder, targets: Iterable[WeightTarget]) -> None:
    """Raise a RuntimeError unless the targets cover every parameter exactly once: filling them fills the model.

    Matrices that become codes are left out here. They stay on the meta device, and the quantiser counts their parts.
    """
    covered: dict[int, int] = {}
    for target in targets:
        storage = target.view.untyped_storage().data_ptr()
        covered[storage] = covered.get(storage, 0) + target.view.numel()
    for parameter in (parameter for parameter in model.parameters() if not parameter.is_meta):
        storage = parameter.untyped_storage().data_ptr()
        padding = getattr(parameter, "padding", 0)
        if covered.get(storage, 0) != parameter.numel() - padding:
            raise RuntimeError(f"targets cover {covered.get(storage, 0)} of a parameter's {parameter.numel()} elements")
