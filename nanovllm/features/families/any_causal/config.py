"""The configuration of any causal model of transformers: what runs, how its tensors are called, and its options."""

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.models.layers.weights import Quantizer
from nanovllm.models.model_config import describe_support, find_refusal, names_causal_model, read_values
from nanovllm.models.sizes import Sizes
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

PRIVATE = (
    "transformers.core_model_loading.revert_weight_conversion",
    "transformers.initialization.no_init_weights",
    "transformers.integrations.hub_kernels.get_kernel",
    "transformers.masking_utils.find_packed_sequence_indices",
)
"""The names of what is used of transformers, and is not public. All of it is used at load."""

RENAMED_HEADS = {"gpt_neox": "embed_out.weight"}
"""{type of model: the LM head's name in checkpoints}, where transformers' module has another name."""

TEXT_PART = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
"""Stands before the names of the text's part, where a checkpoint has other parts."""

UNREAD = "unread."
"""Stands before the names of tensors that are not read: those for pictures and sound, for example."""


def find_class(config: "PretrainedConfig") -> Any:
    """Return transformers' class of causal models for a configuration; None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def make_config(data: dict[str, Any], source: str) -> "PretrainedConfig":
    """Make the configuration that data, the content of config.json, describes. `Family.check` of other families checks.

    Raises:
        ValueError: transformers has no such causal model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in PRIVATE:
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as error:
            version = import_module("transformers").__version__
            raise ValueError(
                f"{source}: transformers {version} has no {name}, which loading this model needs: install one of the "
                "versions 5.8 to 5.24, which were tested in part"
            ) from error
    architectures = data.get("architectures") or []
    kind = data.get("model_type")
    config: Any = None
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        config = read_values(data, CONFIG_MAPPING[kind], source)
    model_class = None if config is None else find_class(config)
    if model_class is None or not names_causal_model(architectures, model_class.__name__):
        raise ValueError(
            f"{describe_support(architectures, source)}, and what transformers has in its table of causal models; "
            f"there model_type {quote(kind)} is {'not' if model_class is None else model_class.__name__}"
        )
    if hasattr(config, "per_layer_config"):
        config.allow_global_per_layer_attribute_access = True
    config.model_impl = "transformers"
    made: PretrainedConfig = config
    return made


def name_tensors(names: Iterable[str], config: "PretrainedConfig") -> dict[str, str]:
    """Return {name in a checkpoint: the name that transformers' causal model knows it by}.

    A checkpoint that has other parts, such as one for pictures, has "language_model." or "text_model." in the names of
    the text's part.
    One that was saved without its LM head lacks the name of the body. The LM head's own may be that of a module.
    """
    body: str = find_class(config).base_model_prefix
    head = name_ends(config)[0].removesuffix("weight")

    def name_head(name: str) -> str:
        """Return the head's own name for that of vLLM's and older files. A head that lies within lm_head has it."""
        return name if head.startswith("lm_head.") else re.sub(r"^lm_head\.", head, name)

    found = {name: name_head(name) for name in names}
    if any(TEXT_PART.match(name) for name in found):
        for name in found:
            inner = name_head(TEXT_PART.sub("", name))
            own = inner if inner.startswith(("lm_head.", head)) else f"{body}.{inner}"
            found[name] = own if inner != name or own == name else UNREAD + name
    elif not any(name.startswith(f"{body}.") for name in found):
        found = {name: own if own.startswith(("lm_head.", head)) else f"{body}.{own}" for name, own in found.items()}
    return found


def name_ends(config: "PretrainedConfig") -> tuple[str, str]:
    """Return the names of the LM head and the embedding in checkpoints. transformers' class says which it would tie."""
    tied: dict[str, str] = find_class(config)._tied_weights_keys or {}
    pairs = ((RENAMED_HEADS.get(config.model_type, head), embedding) for head, embedding in tied.items())
    weights = (pair for pair in pairs if pair[0].endswith(".weight"))
    return next(weights, ("lm_head.weight", "model.embed_tokens.weight"))


def resolve_any(
    asked: EngineConfig,
    config: ResolvedConfig,
    sizes: Sizes,
    quantizer: Quantizer | None,
    gpu_memory: int | None = None,
) -> ResolvedConfig:
    """Refuse what these models cannot do: see `Family.resolve`. Say that transformers' code runs."""
    model: Any = sizes.model
    name = type(model.hf).__name__
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            f"{name} runs through transformers' code, on one rank: leave pipeline_parallel_size "
            f"({config.pipeline_parallel_size}) at 1; data_parallel_size makes replicas"
        )
    if asked.max_model_len is None and model.most_positions is not None:
        config = replace(config, max_model_len=min(config.max_model_len, model.most_positions))
    if model.most_positions is not None and config.max_model_len > model.most_positions:
        raise ValueError(
            f"the angles of {name} (longrope) change beyond {model.most_positions} tokens, also for the shorter "
            f"sequences of a step: max_model_len is {config.max_model_len}; set it to at most {model.most_positions}"
        )
    refusal = find_refusal(model.hf.config)
    logger.warning(
        "%s runs through transformers' code: %d of %d modules are ours%s",
        *(name, *model.count_modules(), f"; this engine's own code does not run it: {refusal}" if refusal else ""),
    )
    return config
