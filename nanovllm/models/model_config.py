"""Reads config.json, refuses what this engine would compute differently, and finds the family of the model."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from nanovllm.models.config_keys import LackingError, check_keys, drop_asides
from nanovllm.models.config_sizes import check_limits, check_positions, check_sizes, stretch_length
from nanovllm.models.text_parts import STAND_INS, read_as_text
from nanovllm.utils.checks import as_number, quote, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """The features that differ between families of decoders.

    Attributes:
        config_class: the name of transformers' class.
        biases: whether the projection of queries, keys and values has a bias, and whether the one of attention's output
            has one. None: both as `attention_bias` says.
        qk_norm: whether each query and key head is normed before the rotation.
        decoder: the path of the decoder's class. Its layers and operators are there.
        check: the path of a function check(config, source), which raises a ValueError, whose message begins with
            `source`, if a value of the configuration is out of range or not supported.
        resolve: the path of a function that returns the options as the family needs them: see `load.resolve_options`.
            None: they stay as they are for other families.
        unread: prefixes of names of tensors. A checkpoint may have tensors with these names; no model reads them.
        rename: the path of a function rename(names, config) of a checkpoint's tensors: see `name_canonically`.
        name_ends: the path of a function name_ends(config), for families that name them otherwise: see `find_ends`.
    """

    config_class: str
    biases: tuple[bool, bool] | None = None
    qk_norm: bool = False
    decoder: str = "nanovllm.models.decoder:Decoder"
    check: str = "nanovllm.models.model_config:check_dense"
    resolve: str | None = None
    unread: tuple[str, ...] = ()
    rename: str = "nanovllm.models.weight_names:name_like_llama"
    name_ends: str | None = None


VISUAL = ("model.visual.", "visual.")
"""The prefixes of tensors for pictures, which no text model reads: see text_parts.py."""

QWEN3_5 = Family(
    "Qwen3_5TextConfig",
    qk_norm=True,
    decoder="nanovllm.features.families.qwen3_5.decoder:HybridDecoder",
    check="nanovllm.features.families.qwen3_5.decoder:check_hybrid",
    resolve="nanovllm.features.families.qwen3_5.states:resolve_states",
    unread=("model.visual.", "mtp."),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    config_class="Qwen3_5MoeTextConfig",
    decoder="nanovllm.features.families.qwen3_5_moe:SparseHybridDecoder",
    check="nanovllm.features.families.qwen3_5_moe:check_sparse_hybrid",
)
FAMILIES = {
    "Qwen3ForCausalLM": Family("Qwen3Config", qk_norm=True, unread=VISUAL),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3MoeConfig",
        qk_norm=True,
        decoder="nanovllm.features.families.qwen3_moe.decoder:SparseDecoder",
        check="nanovllm.features.families.qwen3_moe.decoder:check_sparse",
        unread=VISUAL,
        rename="nanovllm.features.families.qwen3_moe.decoder:name_experts",
    ),
    "Qwen2ForCausalLM": Family("Qwen2Config", biases=(True, False), unread=VISUAL),
    "LlamaForCausalLM": Family("LlamaConfig"),
    "MistralForCausalLM": Family("MistralConfig", biases=(False, False)),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
}
"""By architecture, as config.json names it."""

OTHERS = Family(
    "",
    decoder="nanovllm.features.families.any_causal.decoder:make_decoder",
    resolve="nanovllm.features.families.any_causal.config:resolve_any",
    unread=("unread.", *VISUAL),
    rename="nanovllm.features.families.any_causal.config:name_tensors",
    name_ends="nanovllm.features.families.any_causal.config:name_ends",
)
"""Every other causal model of transformers, whose layers its decoder runs. `MAKE_CONFIG` checks what there is to check.
"""

MAKE_CONFIG = "nanovllm.features.families.any_causal.config:make_config"
"""The path of a function make_config(data, source), which returns the configuration of a model of OTHERS."""

SCORES = "ForSequenceClassification"
"""The end of the names of architectures with a head that scores whole texts."""
OF_SCORES = ("score.", "classifier.")
"""The beginnings of the names of that head's tensors. No decoder reads them: see features/scoring/heads.py."""

SILU = ("silu", "swish")
"""The names of the one activation that is supported: transformers has both."""

DTYPES = {
    **{"float32": "float32", "float": "float32", "fp32": "float32", "f32": "float32"},
    **{"bfloat16": "bfloat16", "bf16": "bfloat16"},
    **{"float16": "float16", "half": "float16", "fp16": "float16", "f16": "float16"},
    **{"float64": "float64", "double": "float64", "fp64": "float64", "f64": "float64"},
}
"""{a spelling of a dtype in files: its name}. "torch." may stand before each spelling."""

ROPE_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Values of yarn that may be left out, or null."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *ROPE_OPTIONAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The rope types, each with the numbers that transformers reads for it, beside rope_theta."""
ROPE_LEAST = {"rope_theta": 1, "mscale": -1, "mscale_all_dim": -1}
"""Numbers must be above these, and the others above 0. The logarithm of rope_theta divides; an mscale may be 0."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; raises a ValueError with the file's name if it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def _parse_int(text: str) -> int | float:
    """Return an integer as Python's int if 64 bits hold it, else as a float, which arithmetic never overflows."""
    number = float(text)
    return int(text) if abs(number) < 2**63 else number


def take_text_config(data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the decoder of text. In most models it is all of it.

    Where a model has other parts, such as one for pictures, it is nested. Whether the LM head is tied may be said at
    either level. If one of them says so, the checkpoint decides: see `fit_to_checkpoint`.
    """
    text = data.get("text_config")
    if not isinstance(text, dict):
        return data
    # The outer level decides some keys, and others where the nested part lacks them.
    deciding = ("architectures", "tie_word_embeddings", "auto_map", *STAND_INS)
    outer: dict[str, Any] = {name: data[name] for name in deciding if name in data}
    outer["whole_model_type"] = data.get("model_type")
    if text.get("tie_word_embeddings") is True:
        outer["tie_word_embeddings"] = True
    defaults = ("dtype", "torch_dtype", "quantization_config", "compression_config", "eos_token_id")
    return {name: data[name] for name in defaults if name in data} | text | outer


def read_dtypes(data: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a config.json with the one spelling of its dtype that transformers reads.

    "auto" names no dtype. Nor do the types of codes, such as int8: they say nothing about what is not quantised.

    Raises:
        ValueError: the dtype is not one of `DTYPES`.
    """
    read: dict[str, str | None] = {}
    for name in ("dtype", "torch_dtype"):
        value = data.get(name)
        if value is None:
            continue
        spelling = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
        names_no_float = re.fullmatch(r"auto|float8_\w+|u?int\d+", spelling)
        if not names_no_float and spelling not in DTYPES:
            raise refuse(value, f"{source}: {name}", f"one of {', '.join(sorted(set(DTYPES.values())))}")
        read[name] = None if names_no_float else DTYPES[spelling]
    return data | read


def read_quantization(data: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose quantization_config is about weights, or is not there.

    Older files have another name for it. And it may be about the KV cache alone: how this engine stores that is said by
    its option kv_cache_dtype.
    """
    settings = data.get("quantization_config")
    if isinstance(compression := data.get("compression_config"), dict) and compression:
        settings = {"quant_method": "compressed-tensors", **compression}
    rest = {name: value for name, value in data.items() if name not in ("quantization_config", "compression_config")}
    if not settings or (isinstance(settings, dict) and is_about_cache_alone(settings)):
        return rest
    return rest | {"quantization_config": name_method(settings)}


def name_method(settings: Any) -> Any:
    """Return a quantization_config that names its method. NVIDIA's ModelOpt may name itself as the producer alone."""
    producer = settings.get("producer") if isinstance(settings, dict) else None
    if not isinstance(producer, dict) or "name" not in producer:
        return settings
    return {"quant_method": producer["name"], **settings}


def is_about_cache_alone(settings: dict[str, Any]) -> bool:
    """Return whether a quantization_config describes how the KV cache is quantised, and nothing else."""
    if settings.get("kv_cache_quant_algo") and not settings.get("quant_algo"):  # as ModelOpt writes it
        return True
    # And as compressed-tensors writes it.
    sparsity = settings.get("sparsity_config")
    is_dense = not sparsity or (isinstance(sparsity, dict) and sparsity.get("format") == "dense")
    has_weights = settings.get("config_groups") or settings.get("transform_config")
    is_compressed = settings.get("quant_method") == "compressed-tensors"
    return bool(is_compressed and settings.get("kv_cache_scheme") and is_dense and not has_weights)


def load_model_config(data: dict[str, Any], source: str, model_impl: str = "auto") -> "PretrainedConfig":
    """Make and check the configuration that data, the content of config.json, describes.

    If the code of `FAMILIES` lacks something for a model, "auto" leaves the model to transformers' code.

    Args:
        source: where the content comes from, for error messages.
        model_impl: the option: whose code computes the model.

    Raises:
        ValueError: data has an architecture or a feature that is not implemented, or values that contradict each other.
    """
    # The config of a `ModelFolder` is that of the text already. Then take_text_config() changes nothing.
    data = read_as_text(take_text_config(data), source)
    architectures = data.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{source}: architectures is {quote(architectures)}; it must be a list")
    refuse_own_code(data, source)
    architecture = find_row(architectures, data.get("model_type"))
    data = read_quantization(read_dtypes(data, source))
    if architecture is None and model_impl == "nanovllm":
        supported = describe_support(architectures, source)
        raise ValueError(f'{supported}; model_impl="auto" also runs causal models by transformers\' code')
    refusal = ""
    if architecture is not None and model_impl != "transformers":
        try:
            return read_family(data, architecture, source)
        except LackingError as error:
            if model_impl == "nanovllm":
                raise
            refusal = str(error)
    config: PretrainedConfig = resolve_name(MAKE_CONFIG)(data, source)
    config.native_refusal = refusal
    return config


def read_family(data: dict[str, Any], architecture: str, source: str) -> "PretrainedConfig":
    """Make and check the configuration of a model whose architecture is a row of `FAMILIES`.

    Raises:
        LackingError: the row's code lacks something that transformers' code may have.
        ValueError: no model can have such values.
    """
    import transformers

    class_name = FAMILIES[architecture].config_class
    config_class = getattr(transformers, class_name, None)
    if config_class is None:
        found = transformers.__version__
        raise ValueError(f"{source}: {architecture} needs {class_name}, which transformers {found} does not have")
    if data.get("model_type", config_class.model_type) != config_class.model_type:
        raise refuse(
            data["model_type"], f"{source}: model_type", f'"{config_class.model_type}", as {architecture} has it'
        )
    config = read_values(data, config_class, source)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // max(config.num_attention_heads, 1)  # `_check` refuses 0 heads
    _check(config, source)
    resolve_name(find_family(config).check)(config, source)
    check_keys(data, config, source)
    return config


def find_refusal(config: "PretrainedConfig") -> str:
    """Return why this engine's own code does not run a model of its families; "" if it does, or has no such family."""
    return str(getattr(config, "native_refusal", ""))


def refuse_own_code(data: dict[str, Any], source: str) -> None:
    """Raise a ValueError if a model needs code from its folder, which its auto_map names.

    transformers has the code of many models whose folders still have their own. It goes by model_type.
    """
    auto_map = data.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise refuse(auto_map, f"{source}: auto_map", "an object")
    if not any(str(name).startswith("AutoModel") for name in auto_map):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = data.get("whole_model_type", data.get("model_type"))
    if str(kind) not in CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"{source}: model_type {quote(kind)} is not in transformers' table, and auto_map names code of the model's "
            "own: code from models is never run here"
        )


def find_row(architectures: list[Any], kind: Any) -> str | None:
    """Return the row of `FAMILIES` that a config.json names; None if it names none.

    Args:
        kind: its model_type. transformers goes by it. So if no architecture has a known name, the model_type decides.
    """
    # Without its LM head the architecture Qwen3ForCausalLM is called Qwen3Model, or by the end of SCORES.
    names = [re.sub(f"(Model|{SCORES})$", "ForCausalLM", name) for name in architectures if isinstance(name, str)]
    named = next((name for name in names if name in FAMILIES), None)
    if named is not None or not isinstance(kind, str):
        return named
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    usual: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    has_pictures = bool(names) and names[0].endswith("ForConditionalGeneration")
    if usual in FAMILIES and not has_pictures and names_causal_model(architectures, usual):
        return usual  # `architectures` spells it in another way
    return None


def names_causal_model(architectures: list[Any], causal: str) -> bool:
    """Return whether a config.json names a causal model: with its LM head, without it, or beside parts for pictures.

    transformers goes by model_type, so the name may be spelled in any way, but it may not be the one of another model.

    Args:
        causal: the name of transformers' class. A class for scores of tokens, for example, has another name.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = str(architectures[0]).lower() if architectures else ""
    if name.endswith("forconditionalgeneration"):
        return True
    if name in map(str.lower, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return name == causal.lower()
    if name.endswith(("forcausallm", "lmheadmodel")):
        return True
    stem = re.sub("forcausallm$|lmheadmodel$", "", causal.lower())
    return name in (f"{stem}model", f"{stem}textmodel", f"{stem}{SCORES}".lower())


def describe_support(architectures: list[Any], source: str) -> str:
    """Return which architectures a config.json names, and which have code here: the beginning of a refusal."""
    named = ", ".join(map(quote, architectures)) or "no architecture"
    return f"{source} names {named}; supported are: {', '.join(FAMILIES)}"


def read_values(data: dict[str, Any], config_class: "type[PretrainedConfig]", source: str) -> "PretrainedConfig":
    """Return the configuration that transformers makes of the content of a config.json; ValueError if it makes none.

    What would choose code is left out: see `drop_asides`. Sizes are bounded before transformers reads them, for it
    makes lists as long as some of them, and afterwards, for it computes some.
    """
    names = config_class.attribute_map
    check_limits(data, names, source)
    try:
        config = config_class.from_dict(drop_asides(config_class._decode_special_floats(data), config_class))
        made = config.to_dict()
    except Exception as error:  # transformers validates with exceptions of many libraries
        told = " ".join(str(error).split())
        kind = quote(config_class.model_type)
        raise ValueError(f"{source} is not a valid configuration of {kind}: {told}") from error
    check_limits(made, names, source)
    check_positions(config, source)
    return config


def is_headless(config: "PretrainedConfig") -> bool:
    """Return whether the architecture has no LM head, so that the model can only embed: it is called Qwen3Model."""
    names = [str(name) for name in config.architectures or ()]
    is_body = bool(names) and all(name.endswith("Model") and not name.endswith("LMHeadModel") for name in names)
    return is_body or has_scores(config)


def has_scores(config: "PretrainedConfig") -> bool:
    """Return whether a head scores whole texts, in the place of the LM head."""
    names = [str(name) for name in config.architectures or ()]
    return bool(names) and all(name.endswith(SCORES) for name in names)


def _check(config: "PretrainedConfig", source: str) -> None:
    """Raise a ValueError for a value that no model can have, and a LackingError for what no family here has."""
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    # In place of one set of parameters, there may be a dict for each kind of layer.
    has_kinds = "rope_type" not in rope and any(isinstance(value, dict) for value in rope.values())
    has_table = rope_type in tuple(ROPE_TYPES) and not has_kinds  # rope_type may be of any Python type
    if has_table:
        _check_rope(rope, source)
    if not 0 < config.rms_norm_eps < math.inf:  # so NaN fails, too
        raise ValueError(f"{source}: rms_norm_eps is {quote(config.rms_norm_eps)}; it must be above 0 and finite")
    check_sizes(config, source)

    def lack(what: str) -> None:
        raise LackingError(f"{source}: {what}")

    if config.hidden_act not in SILU:
        lack(f"hidden_act is {quote(config.hidden_act)}; only silu is supported")
    if getattr(config, "mlp_bias", False):
        lack("mlp_bias is true; biases in the MLP are not supported")
    if has_kinds:
        kinds = ", ".join(map(quote, rope))
        lack(f"rope_parameters has angles for each of {kinds}; one table for all layers is supported")
    if not has_table:
        lack(f"rope type is {quote(rope_type)}; supported are {', '.join(ROPE_TYPES)}")


def _check_rope(rope: dict[str, Any], source: str) -> None:
    """Raise a ValueError if angles cannot be computed with a value of the rope parameters.

    transformers computes with whatever stands there. Values of other rope types are not read.
    """
    rope_type = rope.get("rope_type", "default")
    for name, value in rope.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{source}: {name} of the rope parameters is {value}; it must be finite")
    for name in (*ROPE_TYPES[rope_type], "partial_rotary_factor", "rope_theta"):
        if name not in rope or (rope[name] is None and name in ROPE_OPTIONAL):
            continue
        least = ROPE_LEAST.get(name, 0)
        if not as_number(rope[name], f"{source}: {name} of the rope parameters") > least:
            raise ValueError(f"{source}: {name} is {quote(rope[name])}; it must be above {least}")


def check_dense(config: "PretrainedConfig", source: str) -> None:
    """Check the values that `Decoder` limits: see `Family.check`. `_check` has checked the others.

    Each layer must attend as layer_types says, also in a family whose class does not read this key.
    """
    windows = [find_window(config, index) for index in range(config.num_hidden_layers)]
    if any(window is not None and window < 1 for window in windows):
        raise ValueError(f"{source}: sliding_window is {quote(config.sliding_window)}; it must be at least 1")
    kinds = getattr(config, "layer_types", None)
    if kinds and list(kinds) != ["full_attention" if window is None else "sliding_attention" for window in windows]:
        window = getattr(config, "sliding_window", None)
        raise LackingError(
            f"{source}: layer_types {sorted(set(map(str, kinds)))} with sliding_window {quote(window)} are not "
            f"supported by {type(config).__name__}"
        )
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise LackingError(f"{source}: partial_rotary_factor other than 1 is not supported")


def find_family(config: "PretrainedConfig") -> Family:
    """Return the family that a configuration belongs to."""
    if getattr(config, "model_impl", None) == "transformers":
        return OTHERS
    return next(family for family in FAMILIES.values() if family.config_class == type(config).__name__)


def find_renaming(config: "PretrainedConfig") -> Callable[[list[str], Any], dict[str, str]]:
    """Return the function that names the tensors of a family's checkpoints as its decoder does."""
    return resolve_name(find_family(config).rename)  # type: ignore[no-any-return]


def find_ends(config: "PretrainedConfig") -> tuple[str, str]:
    """Return the names of the LM head and of the embedding among the names that `name_canonically` makes."""
    name_ends = find_family(config).name_ends
    if name_ends is None:
        return "lm_head.weight", "model.embed_tokens.weight"
    names: tuple[str, str] = resolve_name(name_ends)(config)
    return names


def find_rotary_dim(config: "PretrainedConfig") -> int:
    """Return how many elements of a head rotate: the first ones."""
    return int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


def find_window(config: "PretrainedConfig", index: int) -> int | None:
    """Return how many keys a query of a layer sees, its own token's included; None if it sees all up to that.

    The family's class says which keys count: one without layer_types gives each layer the window, and one without
    sliding_window gives none.

    Args:
        index: the number of the layer.
    """
    if not hasattr(type(config), "sliding_window"):
        return None
    if hasattr(type(config), "layer_types") and config.layer_types[index] != "sliding_attention":
        return None
    window: int | None = config.sliding_window
    return window


def limit_length(config: "PretrainedConfig", asked: int | None) -> int:
    """Return the most tokens of a sequence: `asked`, but at most the length that the model is made for.

    None asks for all of that length.
    """
    most = int(getattr(config, "max_position_embeddings", None) or asked or 4096)
    most = max(most, int(stretch_length(config)))
    return most if asked is None else min(asked, most)
