"""Reads how a folder of sentence-transformers makes vectors: modules.json, and the files that it names.

What cannot be had is refused by name when a prompt is to be embedded. The same folder can still generate.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file

from nanovllm.engine.pooling import Dense, Pooling
from nanovllm.models.model_config import read_json
from nanovllm.utils.checks import as_bool, as_integer, quote, refuse

logger = logging.getLogger(__name__)

PACKAGE = "sentence_transformers."
"""The classes of modules that modules.json names are in this package. Others are code of the model's own."""

MODES: Mapping[str, Literal["last", "first", "mean"]] = {"lasttoken": "last", "cls": "first", "mean": "mean"}
OLD_MODES = {
    **{"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"},
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    **{"pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken"},
}
"""The older spelling has a key for each mode, which is true or false. The newer one has `pooling_mode`."""
OF_POOLING = {"embedding_dimension", "word_embedding_dimension", "include_prompt", "pooling_mode", *OLD_MODES}

OF_DENSE = {"in_features", "out_features", "bias", "activation_function"}
TANH = "torch.nn.modules.activation.Tanh"
ACTIVATIONS = {TANH: True, "torch.nn.modules.linear.Identity": False}

KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""sentence-transformers reads the first of the files sentence_KIND_config.json, whatever the model is."""
OF_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
NEUTRAL = {
    **{"do_lower_case": False, "transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    **{"processing_kwargs": {}, "modality_config": {"text": OF_TEXT}},
}
"""Keys of that file that change vectors, each with the only value that can be had."""
HARMLESS = {"max_seq_length", "unpad_inputs", "query_length", "document_length", "query_expansion"}
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
HARMLESS_ARGUMENTS = {"torch_dtype", "dtype", "attn_implementation", "trust_remote_code", "padding_side"}


def read_pooling(folder: Path, hidden_size: int) -> Pooling:
    """Return how the folder's vectors are made. If they cannot be made here, `refusal` of the result says why."""
    try:
        return _read_pooling(folder, hidden_size)
    except ValueError as error:
        return Pooling(refusal=f"this model's vectors cannot be made: {error}")


def _read_pooling(folder: Path, hidden_size: int) -> Pooling:
    source = folder / "modules.json"
    if not source.is_file():
        raise ValueError(f"{folder} has 1_Pooling, and no modules.json, which says what else belongs to it")
    kinds, paths = read_modules(source)
    if kinds[:2] != ["Transformer", "Pooling"] or paths[0] != folder:
        begins = ", ".join(kinds[:2])
        raise ValueError(f'{source} begins with {begins}; it must begin with Transformer, at the path "", and Pooling')
    mode, includes_prompt = _read_mode(paths[1] / "config.json")
    modules: list[Dense | Literal["normalise"]] = []
    size = hidden_size
    for kind, path in zip(kinds[2:], paths[2:], strict=True):
        if kind == "Dense":
            dense = _read_dense(path, size)
            size = len(dense.weight)
            modules.append(dense)
        elif kind == "Normalize":
            _check_place(path / "config.json")
            modules.append("normalise")
        else:
            raise ValueError(f"{source} names {kind}; after the Pooling only Dense and Normalize can be had")
    ends_normalised = modules[-1:] == ["normalise"]
    prompt, dimensions = _read_prompt(folder / "config_sentence_transformers.json")
    if prompt and not includes_prompt:
        raise ValueError(f"{paths[1] / 'config.json'}: include_prompt is false, and there is a default prompt")
    if prompt:
        logger.info("%s: embed() puts the default prompt %s before each text", folder, quote(prompt))
    return Pooling(
        mode=mode,
        modules=tuple(modules[:-1] if ends_normalised else modules),
        ends_normalised=ends_normalised,
        size=size,
        dimensions=dimensions,
        prompt=prompt,
        max_tokens=read_max_tokens(folder, read_transformer(folder, NEUTRAL)),
    )


def read_modules(source: Path) -> tuple[list[str], list[Path]]:
    """Return the names of the modules' classes, and the modules' folders, in the order of modules.json."""
    try:
        listed = json.loads(source.read_text(encoding="utf-8"))
        places = [(module["type"], module["path"]) for module in listed]
        kinds = [kind.removeprefix(PACKAGE).rpartition(".")[2] for kind, _ in places]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{source} is no list of modules, each with a type and a path: {quote(error)}") from error
    for kind, path in places:
        if not kind.startswith(PACKAGE):
            raise ValueError(f"{source} names {quote(kind)}: code from models is never run")
        if not isinstance(path, str) or not re.fullmatch(r"([\w-][\w.-]{0,250})?", path):
            raise refuse(path, f"{source}: path", "the name of a folder beside it")
    return kinds, [source.parent / path for _, path in places]


def _refuse_keys(source: Path, data: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise a ValueError if a file has a key that is not known here: it may change vectors."""
    if strange := sorted(data.keys() - set(known)):
        raise ValueError(f"{source} has {quote(strange[0])} ({quote(data[strange[0]])}), which is not supported")


def _read_mode(source: Path) -> tuple[Literal["last", "first", "mean"], bool]:
    """Return the mode of a Pooling, and whether the tokens of a default prompt count."""
    data = read_json(source)
    _refuse_keys(source, data, OF_POOLING)
    asked = data.get("pooling_mode")
    if asked is None:
        asked = [mode for key, mode in OLD_MODES.items() if data.get(key)] or "mean"
    modes = [asked] if isinstance(asked, str) else asked
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in [*MODES]:
        raise refuse(asked, f"{source}: pooling_mode", f"one of {', '.join(MODES)}: nothing else can be had")
    return MODES[modes[0]], as_bool(data.get("include_prompt", True), f"{source}: include_prompt")


def _check_place(source: Path) -> dict[str, Any]:
    """Return the other keys of a module's file, {} without a file, if the module reads and writes the vector itself."""
    data = read_json(source) if source.is_file() else {}
    for name in ("module_input_name", "module_output_name"):
        if (place := data.pop(name, None)) not in (None, "sentence_embedding"):
            raise refuse(place, f"{source}: {name}", '"sentence_embedding"')
    return data


def _read_dense(folder: Path, size: int) -> Dense:
    """Read a Dense whose input has `size` elements."""
    source = folder / "config.json"
    if not source.is_file():
        raise ValueError(f"{source} is missing")
    data = _check_place(source)
    if data.pop("use_residual", False):
        raise ValueError(f"{source}: use_residual is true, which is not supported")
    _refuse_keys(source, data, OF_DENSE)
    activation = data.get("activation_function", TANH)
    if activation not in [*ACTIVATIONS]:
        raise refuse(activation, f"{source}: activation_function", f"one of {', '.join(ACTIVATIONS)}")
    out_size = as_integer(data.get("out_features"), f"{source}: out_features", 1)
    shapes = {"linear.weight": [out_size, size]}
    if as_bool(data.get("bias", True), f"{source}: bias"):
        shapes["linear.bias"] = [out_size]
    weights = folder / "model.safetensors"
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} cannot be read: {error}; a pytorch_model.bin must be converted to it") from error
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise ValueError(f"{weights} has tensors of the shapes {quote(found)}; they must be {shapes}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{weights}: {name} has values that are no finite numbers of a floating-point type")
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), ACTIVATIONS[activation])


def _read_prompt(source: Path) -> tuple[str, int | None]:
    """Return the default prompt, "" if there is none, and how many elements of a vector are kept, None for all."""
    data = read_json(source) if source.is_file() else {}
    if (kind := data.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise refuse(kind, f"{source}: model_type", '"SentenceTransformer"')
    dimensions = data.get("truncate_dim")
    if dimensions is not None:
        dimensions = as_integer(dimensions, f"{source}: truncate_dim", 1)
    if (name := data.get("default_prompt_name")) is None:
        return "", dimensions
    prompts = data.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise refuse(name, f"{source}: default_prompt_name", "null, or the name of one of its prompts")
    return prompt, dimensions


def read_transformer(folder: Path, neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the Transformer's file says; {} without a file.

    Args:
        neutral: keys that change texts or vectors, each with the only value that can be had.

    Raises:
        ValueError: the file asks for something else.
    """
    sources = [folder / f"sentence_{kind}_config.json" for kind in KINDS]
    source = next((path for path in sources if path.is_file()), None)
    if source is None:
        return {}
    data = read_json(source)
    _refuse_keys(source, data, {*NEUTRAL, *HARMLESS, *ARGUMENTS})
    for name, value in neutral.items():
        if data.get(name) not in (None, value):
            raise refuse(data[name], f"{source}: {name}", quote(value))
    for name in ARGUMENTS:
        arguments = data.get(name) or {}
        if not isinstance(arguments, dict) or not arguments.keys() <= HARMLESS_ARGUMENTS:
            raise refuse(arguments, f"{source}: {name}", f"of the keys {', '.join(sorted(HARMLESS_ARGUMENTS))}")
    return data


def read_max_tokens(folder: Path, data: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a text; None if there is no limit.

    Args:
        data: see `read_transformer`.
    """
    if (limit := data.get("max_seq_length")) is not None:
        return as_integer(limit, f"{folder}: max_seq_length", 1)
    path = folder / "tokenizer_config.json"
    limit = read_json(path).get("model_max_length") if path.is_file() else None
    is_limit = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    return limit if is_limit else None  # transformers' "no limit" is a float here
