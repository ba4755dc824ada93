"""Fills a model from safetensors, and proves that every parameter was filled."""

import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import Quantizer, WeightTarget
from nanovllm.models.model_config import find_ends, find_renaming, read_json
from nanovllm.models.weight_names import find_elsewhere, find_targets
from nanovllm.utils.checks import quote
from nanovllm.utils.progress import hide_unless

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

READ_AHEAD = 4 << 30
"""Bytes that a fast disk reads while Python imports."""

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")

FOREIGN = re.compile(r"consolidated|adapter_model|optimizer|training")
"""The beginning of names of files that are no checkpoint for transformers: consolidated.safetensors has Mistral's own
names of tensors, and the others come from training."""


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


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    If there is a model.safetensors, it is the checkpoint, as for transformers, unless an index names it among others.
    Else the index names the files. Without an index they are all shards, or all files but those of `FOREIGN`.

    Raises:
        ValueError: there is none, or one that the index or a shard's name tells of is missing or cannot be read.
    """
    names = read_index(folder / INDEX) if os.path.lexists(folder / INDEX) else set()
    if os.path.lexists(folder / WHOLE) and WHOLE not in names:
        names = {WHOLE}
    missing = sorted(name for name in names if not os.path.lexists(folder / name))
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:5])}")
    files = [folder / name for name in sorted(names or find_shards(folder))]
    if not files:
        others = [p.name for pattern in ("*.bin", "*.pt", "*.gguf") for p in folder.glob(pattern)]
        instead = f" (only {', '.join(sorted(others)[:3])}: convert it to safetensors)" if others else ""
        raise ValueError(f"{folder} has no safetensors files{instead}")
    for path in files:
        check_is_file(path)
    return files


def read_index(index: Path) -> set[str]:
    """Return the names of the files that an index of shards names; ValueError if it names none, or strange ones."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    names = set(map(str, weight_map.values()))
    if strange := sorted(name for name in names if not re.fullmatch(r"[\w.-]{1,238}\.safetensors", name)):
        raise ValueError(
            f"{index} names {quote(strange[0])}; shards must be files of its own folder, and end in .safetensors"
        )
    return names


def find_shards(folder: Path) -> list[str]:
    """Return the names of the files to read in a folder without an index and without model.safetensors.

    Raises:
        ValueError: the folder has shards of two checkpoints.
    """
    files = [path.name for path in folder.glob("*.safetensors")]
    own = [name for name in files if not FOREIGN.match(name)]
    shards = {name: match.groups() for name in own if (match := SHARD.fullmatch(name)) is not None}
    if len(set(shards.values())) > 1:
        raise ValueError(
            f"{folder} has shards of several checkpoints, such as {min(shards)} and {max(shards)}, and no "
            "model.safetensors.index.json that chooses: delete the others"
        )
    return list(shards) or own or files


def check_is_file(path: Path) -> None:
    """Raise a ValueError unless a path leads to a file: a symbolic link may lead nowhere, or round in a circle."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        link = f", a symbolic link to {quote(str(path.readlink()))}," if path.is_symlink() else ""
        raise ValueError(f"{path}{link} cannot be read: {error.strerror}") from error
    if not is_file:
        raise ValueError(f"{path} is not a file")


def stamp_checkpoint(folder: Path) -> tuple[tuple[Path, int, int, int], ...]:
    """Return (path, bytes, time of the last change, inode) of each file of a checkpoint: other files, other stamps."""
    facts = [(path, path.stat()) for path in checkpoint_files(folder)]
    return tuple((path, fact.st_size, fact.st_mtime_ns, fact.st_ino) for path, fact in facts)


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


def name_some(names: Iterable[str]) -> str:
    """Return the first five of the names, and how many more there are, for an error message."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_weights(
    model: Decoder,
    parallel: Parallel,
    quantizer: Quantizer | None,
    *,
    config: "PretrainedConfig",
    folder: Path,
    unread: tuple[str, ...],
    adapter: Merger | None = None,
) -> None:
    """Fill the model from the folder's safetensors, one tensor at a time. Each rank reads only its own share.

    Args:
        quantizer: quantises matrices as they are read.
        config: the model's configuration.
        folder: the folder of the checkpoint.
        unread: prefixes of names of tensors that no model of the family reads.
        adapter: is merged into the weights as they are read.

    Raises:
        ValueError: a file cannot be read, or a tensor is missing, unexpected, in two files, or of another shape.
    """
    show_progress = parallel.rank == 0
    files = checkpoint_files(folder)
    places = find_names(files)
    names = name_canonically(places, config)
    found = set(names.values())
    targets: dict[str, list[WeightTarget]] = {}
    for name, target in find_targets(model, found) if quantizer is None else quantizer.find_targets(model, found):
        targets.setdefault(name, []).append(target)
    _check_cover(model, chain.from_iterable(targets.values()))
    if missing := targets.keys() - found:
        raise ValueError(f"{folder} lacks {len(missing)} tensors: {name_some(missing)}")
    unread_here = {name for name in found if name.startswith(unread)}
    if unread_here and show_progress:
        logger.info("%s: %d tensors are not read: %s", folder, len(unread_here), name_some(unread_here))
    elsewhere = unread_here.union(name for name in found if name.startswith(find_elsewhere(model)))
    head, _ = find_ends(config)
    leftovers = found - targets.keys() - elsewhere - {head}  # some checkpoints hold a tied head, too
    if leftovers:
        from nanovllm.models.leftovers import check_leftovers

        own = {name: path for name, path in places.items() if names[name] in leftovers}
        check_leftovers(own, names, targets, config, folder)
        if show_progress:
            logger.info("%s: %d tensors change nothing: %s", folder, len(leftovers), name_some(leftovers))
    if adapter is not None:
        adapter.check_names(targets.keys() | elsewhere)
    copy = model.backend.make_copier()
    for path in tqdm(files, desc="Loading weights", unit="file", **hide_unless(show_progress and len(files) > 1)):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                parallel.raise_failure()
                source = file.get_slice(name)
                if adapter is not None:
                    source = adapter.merge(names[name], source)
                for target in targets.get(names[name], ()):
                    _fill(target, source, f"{path}: tensor {name}", copy)


def find_names(files: Iterable[Path]) -> dict[str, Path]:
    """Return {name of a tensor: its file} of a checkpoint's files; ValueError if two files have the same name."""
    found: dict[str, Path] = {}
    for path in files:
        with open_tensors(path) as file:
            names = file.keys()
        if double := found.keys() & set(names):
            raise ValueError(f"{path}: tensor {min(double)} is in another file too")
        found |= dict.fromkeys(names, path)
    return found


def name_canonically(names: Iterable[str], config: "PretrainedConfig | None" = None) -> dict[str, str]:
    """Return {name: the name that the model knows it by}, by the rule of its family: see `name_like_llama`."""
    rename = name_like_llama if config is None else find_renaming(config)
    return rename(list(names), config)


def name_like_llama(names: list[str], _: Any = None) -> dict[str, str]:
    """Return {name: the name that the model knows it by}. A checkpoint without an LM head has no "model." there.

    In a checkpoint that has other parts, such as one for pictures, "language_model." stands before the names as well.

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


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of tensors; raises a ValueError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _fill(target: WeightTarget, source: Any, what: str, copy: Callable[[Tensor, Tensor], object]) -> None:
    dtype = source.get_dtype()
    if dtype not in target.dtypes:
        raise ValueError(f"{what} is {dtype}; config.json asks for one of {', '.join(target.dtypes)}")
    shape = tuple(source.get_shape())
    if (shape or (1,)) != target.shape:  # a number may be stored without dimensions
        raise ValueError(f"{what} has shape {list(shape)}; config.json asks for {list(target.shape)}")
    target.fill(source, copy)


def _check_cover(model: Decoder, targets: Iterable[WeightTarget]) -> None:
    """Raise a RuntimeError unless the targets cover every parameter exactly once: filling them fills the model.

    A quantiser keeps count of its matrices itself. They are on the meta device.
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
