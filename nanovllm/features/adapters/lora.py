"""Merges one LoRA adapter into the weights while they are read (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

An adapter has two small matrices for each matrix W [out, in] that it changes: A [r, in] and B [out, r]. The merged
matrix is W + scale * B A. The sum is computed in float32 and rounded once, to the dtype of the model.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanovllm.models.hub import as_path
from nanovllm.models.model_config import read_json
from nanovllm.utils.checks import as_integer, as_number, quote
from nanovllm.utils.digests import ADAPTER, find_lacking

CONFIG, WEIGHTS = ADAPTER
PREFIX = "base_model.model."
COPIED = ("model.embed_tokens.weight", "lm_head.weight")
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights")
"""Keys of adapter_config.json that are read here."""
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("swift_type", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),  # ms-swift's
)
"""Keys that say how an adapter was trained, or what its tensors say as well. Any other key with a value is refused."""
SAME_BASES = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the model's own weights as they are. After others an adapter fits no published checkpoint.
"""


class Adapter:
    """An adapter of PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

    def __init__(self, folder: str, option: str = "lora") -> None:
        """Read the adapter. ValueError if a file is missing or damaged, or if the adapter cannot be merged.

        Args:
            option: what names the folder, for error messages.
        """
        path = as_path(folder, option)
        check_files(path, option)
        self._source = path / WEIGHTS
        self._rank, self._scale = _read_config(path / CONFIG)
        try:
            tensors = load_file(self._source)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self._source} cannot be read: {error}") from error
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        """{name of a checkpoint's tensor: (A [r, in], B [out, r])}, in float32."""
        self._copies: dict[str, Tensor] = {}
        """{name of a checkpoint's tensor: its copy}. PEFT saves embedding and head beside an adapter of the head."""
        for name in tensors:
            own = name.removeprefix(PREFIX).replace("model.language_model.", "model.", 1)
            if own.replace(".base_layer.", ".") in COPIED:
                self._copies[own.replace(".base_layer.", ".")] = tensors[name]
                continue
            a = name.replace(".lora_B.weight", ".lora_A.weight")
            b = name.replace(".lora_A.weight", ".lora_B.weight")
            if a == b or a not in tensors or b not in tensors:
                raise ValueError(f"{self._source} has the tensor {quote(name)}, which cannot be merged")
            module = own.partition(".lora_")[0]  # A and B make the same entry
            self._pairs[f"{module}.weight"] = (tensors[a].float(), tensors[b].float())
        if not self._pairs:
            raise ValueError(f"{self._source} changes no matrix: it has no lora_A")

    @property
    def names(self) -> frozenset[str]:
        """The names of the matrices that it changes."""
        return frozenset(self._pairs)

    def check_names(self, names: Collection[str]) -> None:
        """Raise a ValueError unless each of the adapter's matrices is one that the model reads from its checkpoint."""
        if strange := sorted(self._pairs.keys() - set(names)):
            raise ValueError(
                f"{self._source} changes {len(strange)} matrices that are not in the checkpoint, such as "
                f"{quote(strange[0])}: it was made for another model"
            )

    def merge(self, name: str, source: Any) -> Any:
        """Return what the loader reads instead of a checkpoint's tensor: its `source`, or the merged matrix.

        Args:
            source: a slice object of safetensors.
        """
        if name in self._copies and not torch.equal(source[:].float(), self._copies[name].float()):
            raise ValueError(f"{self._source} has {quote(name)} with other values than the checkpoint")
        if name not in self._pairs:
            return source
        a, b = self._pairs[name]
        shape = list(source.get_shape())
        fits = len(shape) == 2 and list(b.shape) == [shape[0], self._rank] and list(a.shape) == [self._rank, shape[1]]
        if not fits:
            raise ValueError(
                f"{self._source} has {quote(name)} as {list(b.shape)} times {list(a.shape)}, and r={self._rank}; the "
                f"checkpoint's matrix is {shape}"
            )
        return _MergedMatrix(source, a, b, self._scale)


class _MergedMatrix:
    """W + scale * B A. It has the methods of a slice object of safetensors that the loader calls."""

    def __init__(self, source: Any, a: Tensor, b: Tensor, scale: float) -> None:
        self._source = source
        self.get_dtype = source.get_dtype
        self.get_shape = source.get_shape
        self._a = a
        self._b = b
        self._scale = scale

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        rows, columns = slices
        weight: Tensor = self._source[slices].float()
        return weight + self._scale * (self._b[rows] @ self._a[:, columns])


def check_files(folder: Path, option: str) -> None:
    """Raise a ValueError unless a folder has the two files of an adapter; `option` is what names the folder."""
    if (name := find_lacking(folder)) is not None:
        raise ValueError(f"{option} is {quote(str(folder))}, which has no {name}; it must be a folder that PEFT saved")


def _read_config(path: Path) -> tuple[int, float]:
    """Return the rank and the scale of an adapter; ValueError if it has a feature that cannot be merged."""
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {quote(config.get('peft_type'))}; only LORA can be merged")
    for key, value in config.items():
        if value and key not in READ and key not in HARMLESS:
            raise ValueError(f"{path}: {quote(key)} is not supported; merge the adapter with PEFT's merge_and_unload")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias is {quote(config['bias'])}; only adapters without biases are supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in SAME_BASES:
        raise ValueError(
            f"{path}: init_lora_weights is {quote(start)}, which may change the model's own weights, too; "
            f"{', '.join(SAME_BASES)} leave them as they are"
        )
    rank = as_integer(config.get("r"), f"{path}: r", 1)
    alpha = as_number(config.get("lora_alpha"), f"{path}: lora_alpha")
    if not math.isfinite(alpha):
        raise ValueError(f"{path}: lora_alpha is {alpha}; it must be finite")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
