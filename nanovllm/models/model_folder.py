"""A model's folder: what its files say. Each file is read once, when somebody first asks for what it says."""

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.engine.pooling import Pooling
from nanovllm.models.hub import QUANTIZATION_CONFIGS, find_tokenizer
from nanovllm.models.model_config import is_about_cache_alone, name_method, read_json, take_text_config
from nanovllm.text.tokenizer import Tokenizer, find_conversion
from nanovllm.utils.checks import INT64_MAX, quote

logger = logging.getLogger(__name__)

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")

FOREIGN = re.compile(r"consolidated|adapter_model|optimizer|training")
"""The beginning of names of files that are no checkpoint for transformers: consolidated.safetensors has Mistral's own
names of tensors, and the others come from training."""

CODES = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""The ends of names of tensors of which each shows that a checkpoint has quantised matrices."""

SETTINGS_FILE = "settings_file"
"""The key of a quantization_config that names the file which it comes from, if that is not config.json."""


class ModelFolder:
    """The files of a folder in which a model was saved. A model in another form has a subclass.

    Every property raises a ValueError that names a file which cannot be read. Ranks get the object with what it has
    read. `refresh` returns another one if files of the checkpoint have changed since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def source(self) -> str:
        """The path of config.json, for messages."""
        return str(self.path / "config.json")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The part of config.json for the decoder of text.

        Older tools write how the weights are quantised into another file. It becomes the quantization_config, unless
        config.json has one that names its method.
        """
        data = take_text_config(read_json(self.path / "config.json"))
        own = name_method(data.get("quantization_config"))
        method = own.get("quant_method") if isinstance(own, dict) else own
        settings = self.find_settings()
        if settings is None or data.get("compression_config") or method or is_about_cache_alone(settings):
            return data
        # If no weights are quantised, the other file is a leftover. In an estimate the folder may have no weights: then
        # the file counts.
        if any(self.path.glob("*.safetensors")) and not any(name.endswith(CODES) for name in self.places):
            logger.info("%s of %s is not read: no tensor is quantised", settings[SETTINGS_FILE], self)
            return data
        return data | {"quantization_config": settings}

    def find_settings(self) -> dict[str, Any] | None:
        """Return the settings of quantisation that older tools keep beside config.json, in the form that they have
        there; None if there is no such file."""
        name = next((name for name in QUANTIZATION_CONFIGS if (self.path / name).is_file()), None)
        if name is None:
            return None
        data = read_json(self.path / name)
        if name == "hf_quant_config.json":  # of NVIDIA's ModelOpt
            method = "modelopt"
            data = data["quantization"] if isinstance(data.get("quantization"), dict) else data
        else:
            method = "awq" if name == "quant_config.json" or "w_bit" in data else "gptq"
        return {"quant_method": method, **data, SETTINGS_FILE: name}

    @property
    def generation_source(self) -> str:
        """The path of generation_config.json, for messages."""
        return str(self.path / "generation_config.json")

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; {} if there is no such file."""
        path = Path(self.generation_source)
        return read_json(path) if path.is_file() else {}

    @cached_property
    def index(self) -> set[str]:
        """The names of the files that the index of shards names; empty if there is no index."""
        index = self.path / INDEX
        if not os.path.lexists(index):
            return set()
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        names = set(map(str, weight_map.values()))
        if strange := sorted(name for name in names if not re.fullmatch(r"[\w.-]{1,238}\.safetensors", name)):
            raise ValueError(
                f"{index} names {quote(strange[0])}; shards must be files of its own folder, and end in .safetensors"
            )
        return names

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files of the checkpoint.

        As for transformers, it is the first of these that is there: a model.safetensors that the index does not name;
        the files that the index names; all shards; all files but those of `FOREIGN`. It is a ValueError if there is
        none, or if one that the index or a shard's name tells of is missing.
        """
        names = self.index
        if os.path.lexists(self.path / WHOLE) and WHOLE not in names:
            names = {WHOLE}
        missing = sorted(name for name in names if not os.path.lexists(self.path / name))
        if missing:
            raise ValueError(f"{self} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:5])}")
        files = [self.path / name for name in sorted(names or find_shards(self.path))]
        if not files:
            others = [p.name for pattern in ("*.bin", "*.pt") for p in self.path.glob(pattern)]
            instead = f" (only {', '.join(sorted(others)[:3])}: convert it to safetensors)" if others else ""
            raise ValueError(f"{self} has no safetensors files{instead}")
        for path in files:
            check_is_file(path)
        return files

    @contextmanager
    def open_tensors(self, path: Path) -> Iterator[Any]:
        """Open a file of tensors; raises a ValueError if it cannot be read.

        Yields:
            What safetensors' `safe_open` returns, or an object with its methods `keys` and `get_slice`.
        """
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    @cached_property
    def places(self) -> dict[str, Path]:
        """{name of a tensor: its file}. It is a ValueError if two files have the same name."""
        found: dict[str, Path] = {}
        for path in self.files:
            with self.open_tensors(path) as file:
                names = file.keys()
            if double := found.keys() & set(names):
                raise ValueError(f"{path}: tensor {min(double)} is in another file too")
            found |= dict.fromkeys(names, path)
        return found

    @cached_property
    def stamps(self) -> tuple[tuple[Path, int, int, int], ...]:
        """(path, bytes, time of the last change, inode) of each file of the checkpoint: other files, other stamps."""
        facts = [(path.absolute(), path.stat()) for path in self.files]
        return tuple((path, fact.st_size, fact.st_mtime_ns, fact.st_ino) for path, fact in facts)

    @property
    def pooling(self) -> Pooling | None:
        """How the model makes vectors; None if the files of sentence-transformers say it, or nobody."""
        return None

    def read_tokenizer(self, max_model_len: int = INT64_MAX) -> Tokenizer | None:
        """Return the model's tokenizer; None if it has none. See `Tokenizer`."""
        return Tokenizer.find(self.path, max_model_len)

    def refresh(self) -> "ModelFolder":
        """Return this object, or one that has read nothing if the checkpoint has other files now."""
        now = type(self)(self.path)
        return self if now.stamps == self.stamps else now


def find_shards(folder: Path) -> list[str]:
    """Return the names of the files to read in a folder without an index and without model.safetensors.

    Raises:
        ValueError: the folder has shards of two checkpoints.
    """
    files = [path.name for path in folder.glob("*.safetensors")]
    own = [name for name in files if not FOREIGN.match(name)]
    shards = {name: match.group(1, 3) for name in own if (match := SHARD.fullmatch(name)) is not None}
    if len(set(shards.values())) > 1:
        raise ValueError(
            f"{folder} has shards of several checkpoints, such as {min(shards)} and {max(shards)}, and no "
            "model.safetensors.index.json that chooses: delete the others"
        )
    return list(shards) or own or files


def read_tokenizer(name: str | None, model: ModelFolder | None, max_model_len: int = INT64_MAX) -> Tokenizer | None:
    """Return the tokenizer for a model; None if there is none.

    Args:
        name: the option `tokenizer`; None takes the model's own.
        model: the model's folder; None if it is a shape alone.

    Raises:
        ValueError: the tokenizer cannot be read, or the option names a folder without one.
    """
    if name is None:
        return None if model is None else model.read_tokenizer(max_model_len)
    folder = find_tokenizer(name)
    found = Tokenizer.find(folder, max_model_len)
    if found is None:
        raise ValueError(f"tokenizer {quote(name)}: {find_conversion(folder) or f'there is none in {folder}'}")
    return found


def check_is_file(path: Path) -> None:
    """Raise a ValueError unless a path leads to a file: a symbolic link may lead nowhere, or round in a circle."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        link = f", a symbolic link to {quote(str(path.readlink()))}," if path.is_symlink() else ""
        raise ValueError(f"{path}{link} cannot be read: {error.strerror}") from error
    if not is_file:
        raise ValueError(f"{path} is not a file")
