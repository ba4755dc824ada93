"""Reads what the headers of a checkpoint's files say: the names of its tensors and their shapes, before any weights."""

import logging
import math
import re
from typing import TYPE_CHECKING

import torch

from nanovllm.models.layers.weights import FLOATS
from nanovllm.models.model_config import OTHERS, find_ends, find_family, is_headless
from nanovllm.models.model_folder import ModelFolder
from nanovllm.models.weight_names import name_canonically, name_some

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 1024

SHAPES = (
    ("model.embed_tokens.weight", (("vocab_size",), ("hidden_size",))),
    ("model.norm.weight", (("hidden_size",),)),
    ("self_attn.k_proj.weight", (("num_key_value_heads", "head_dim"), ("hidden_size",))),
    ("self_attn.o_proj.weight", (("hidden_size",), ("num_attention_heads", "head_dim"))),
    ("mlp.down_proj.weight", (("hidden_size",), ("intermediate_size",))),
    ("mlp.experts.0.down_proj.weight", (("hidden_size",), ("moe_intermediate_size",))),
)
"""(end of a tensor's name, the sizes whose product is each of its dimensions). A quantised checkpoint may have the
tensor in another form, and then without this name."""


class Headers:
    """The headers of a checkpoint's files. Names of tensors are canonical here: see `name_canonically`."""

    def __init__(self, folder: ModelFolder, config: "PretrainedConfig | None" = None) -> None:
        """Read them; ValueError if a file cannot be read, or two files have the same tensor."""
        self.folder = folder
        canonical = name_canonically(folder.places, config)
        self._places = {canonical[name]: (path, name) for name, path in folder.places.items()}
        self.names = frozenset(self._places)
        self.has_prefix = any(name.startswith("model.") for name in folder.places)
        """Whether the files' own names begin with "model.", as those of a model with an LM head do."""

    def count_layers(self) -> int:
        """Return the number of layers that have tensors, counted by the last one; 0 if no name has such a form."""
        found = (re.match(r"model\.layers\.(\d{1,9})\.", name) for name in self.names)
        return max((int(match[1]) + 1 for match in found if match is not None), default=0)

    def find_ending(self, ending: str) -> str | None:
        """Return a tensor whose name ends in this way, after a dot or whole; None if there is none."""
        ends = (name for name in self.names if name == ending or name.endswith(f".{ending}"))
        return min(ends, default=None)

    def read_shape(self, name: str) -> list[int] | None:
        """Return the shape of a tensor; None if it holds codes, whose shape depends on their format."""
        path, own = self._places[name]
        with self.folder.open_tensors(path) as file:
            tensor = file.get_slice(own)
            return list(tensor.get_shape()) if tensor.get_dtype() in FLOATS else None

    def has_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same values, in whatever formats. It reads a few rows at a time."""
        path, own = self._places[name]
        other_path, other_own = self._places[other]
        with self.folder.open_tensors(path) as file, self.folder.open_tensors(other_path) as other_file:
            one = file.get_slice(own)
            two = other_file.get_slice(other_own)
            shape = one.get_shape()
            if shape != two.get_shape() or not shape:
                return False
            parts = [slice(start, start + ROWS_AT_A_TIME) for start in range(0, shape[0], ROWS_AT_A_TIME)]
            return all(torch.equal(one[part].double(), two[part].double()) for part in parts)


def fit_to_checkpoint(config: "PretrainedConfig", folder: ModelFolder | None) -> bool:
    """Check a configuration's sizes by the checkpoint, and tie the LM head as the checkpoint has it.

    config.json may say that the head is tied, and the checkpoint may have a head of its own, with other values: after
    fine-tuning, merging or new tokens. Then the head is the checkpoint's, as in transformers.

    Args:
        config: its `tie_word_embeddings` becomes true if there is no head, so that the decoder allocates none, and
            false if the checkpoint has a head of its own. Its `has_turned_experts` is set: see the function of this
            name.
        folder: the checkpoint's; None for random weights.

    Returns:
        Whether the model can generate. Checkpoints that only embed may come without an LM head.

    Raises:
        ValueError: the checkpoint cannot be read, or has other sizes.
    """
    can_generate = not is_headless(config)
    if folder is not None:
        headers = Headers(folder, config)
        report_unread_files(folder)
        head, embedding = find_ends(config)
        if find_family(config) is not OTHERS:
            compare_sizes(config, headers)
            config.has_turned_experts = has_turned_experts(config, headers)
            # Names with "model." are those of a model with a head. If its head is not there, it is missing, and the
            # loader says so.
            can_generate &= config.tie_word_embeddings or head in headers.names or headers.has_prefix
        if can_generate and config.tie_word_embeddings and has_own_head(headers, head, embedding):
            logger.warning(
                "config.json in %s says that the LM head is tied to the embedding, and the checkpoint has a head of "
                'its own with other values, which is used: set "tie_word_embeddings" to false there',
                folder,
            )
            config.tie_word_embeddings = False
    if not can_generate:
        config.tie_word_embeddings = True
    return can_generate


def report_unread_files(folder: ModelFolder) -> None:
    """Log the files of tensors that are beside the checkpoint's and are not read. An index may have named them."""
    files = {path.name for path in folder.files}
    if (folder.path / "adapter_config.json").is_file():
        logger.warning(
            "%s has an adapter (LoRA) beside the model, which is merged only by the option lora=%r",
            *(folder, str(folder)),
        )
    beside = {path.name for path in folder.path.glob("*.safetensors")} - files
    if not beside:
        return
    # Whether there is an index, and it names none of the files that are read.
    is_contradicted = bool(folder.index) and not files & folder.index
    logger.log(
        logging.WARNING if is_contradicted else logging.INFO,
        "%s: the weights are those of %s, as transformers reads them; not read: %s%s",
        *(folder, name_some(files), name_some(beside)),
        ", of which model.safetensors.index.json names some: delete what is out of date" if is_contradicted else "",
    )


def has_own_head(headers: Headers, head: str, embedding: str) -> bool:
    """Return whether a checkpoint has an LM head with other values than its embedding. They have these names."""
    if head in headers.names:
        return embedding in headers.names and not headers.has_equal(head, embedding)
    # A head that is quantised has several tensors, and is not the embedding, which is not quantised beside it.
    module = head.removesuffix("weight")
    return any(name.startswith(module) and not name.endswith(".bias") for name in headers.names)


def has_turned_experts(config: "PretrainedConfig", headers: Headers) -> bool:
    """Return whether a tensor of all experts has their matrices as [in, out]. As in transformers, its shape says so."""
    name = headers.find_ending("mlp.experts.down_proj")
    if name is None:
        return False
    size = config.moe_intermediate_size
    shape = headers.read_shape(name) or []
    is_square = size == config.hidden_size  # then the shape shows nothing, and matrices count as [out, in]
    return shape[1:] == [size, config.hidden_size] and not is_square


def compare_sizes(config: "PretrainedConfig", headers: Headers) -> None:
    """Raise a ValueError if a size differs from the checkpoint's.

    The loader compares every tensor's shape. Here the few that show the sizes of all others are compared, because it
    takes no memory and no module. A checkpoint with more layers is left to the loader, which names their tensors.
    """
    asked = config.num_hidden_layers
    num_layers = headers.count_layers()
    if 0 < num_layers < asked:
        raise ValueError(
            f"{headers.folder} lacks tensors: config.json says that num_hidden_layers is {asked}, and the checkpoint "
            f"has the tensors of {num_layers} layers, model.layers.0 to {num_layers - 1}"
        )
    for ending, dimensions in SHAPES:
        name = headers.find_ending(ending)
        if name is None or not all(hasattr(config, size) for sizes in dimensions for size in sizes):
            continue
        wanted = [math.prod(int(getattr(config, size)) for size in sizes) for sizes in dimensions]
        shape = headers.read_shape(name)
        if shape is not None and shape != wanted:
            names = ", ".join(" x ".join(sizes) for sizes in dimensions)
            raise ValueError(
                f"{headers.folder}: tensor {name} has shape {shape}; config.json asks for {wanted} ({names})"
            )
