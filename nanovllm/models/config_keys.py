"""Checks the keys of config.json: one that changes the mathematics and that nobody reads would give wrong numbers."""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from nanovllm.models.text_parts import STAND_INS
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


def list_names(text: str) -> frozenset[str]:
    """Return the names that stand in a text, with white space between them."""
    return frozenset(text.split())


READ = list_names(
    """
    architectures model_type quantization_config compression_config dtype eos_token_id
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings initializer_range attention_bias mlp_bias
    sliding_window layer_types rope_parameters rope_theta partial_rotary_factor
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers
    shared_expert_intermediate_size has_turned_experts
    """
).union(STAND_INS)
"""The keys that the engine reads."""

TRANSLATED = list_names(
    "torch_dtype rope_scaling use_sliding_window max_window_layers num_local_experts full_attention_interval"
)
"""The keys that transformers turns into keys that the engine reads."""

HARMLESS = list_names(
    """
    transformers_version id2label label2id num_labels problem_type bos_token_id pad_token_id
    attention_dropout router_aux_loss_coef pretraining_tp
    attn_output_gate mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings
    """
)
"""The keys that change no logits: names, and what only training reads."""

ASIDES = list_names(
    """
    auto_map whole_model_type model_impl native_refusal name_or_path _name_or_path _commit_hash
    attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    experts_implementation _experts_implementation _experts_implementation_internal
    return_dict use_return_dict use_cache torchscript output_attentions output_hidden_states output_router_logits
    gradient_checkpointing
    """
)
"""The keys that are no property of a model: whose code computes it, what transformers' methods return and keep."""

KNOWN = READ | TRANSLATED | HARMLESS | ASIDES


class LackingError(ValueError):
    """This engine's own code lacks what a configuration asks for. transformers' code may have it."""


def drop_asides(data: Mapping[str, Any], config_class: "type[PretrainedConfig]") -> dict[str, Any]:
    """Return the content of a config.json without what would choose code, at every level.

    transformers' configuration takes any key as an attribute. So a key may also replace a method, or a private value:
    of these a configuration gets only the ones that its class has as fields.
    """
    own = {field.name for field in fields(config_class)}

    def is_passed_on(name: str) -> bool:
        if name in own or name == "model_type":
            return name not in ASIDES
        found = inspect.getattr_static(config_class, name, None)
        may_be_set = found is None or (isinstance(found, property) and found.fset is not None)
        return may_be_set and name not in ASIDES and not name.startswith("_")

    return {
        name: drop_asides(value, config_class) if isinstance(value, dict) else value
        for name, value in data.items()
        if not isinstance(name, str) or is_passed_on(name)  # transformers' id2label has whole numbers as names
    }


def check_keys(data: Mapping[str, Any], config: "PretrainedConfig", source: str) -> None:
    """Refuse keys that transformers reads and the engine does not. Log keys that neither of them reads.

    Args:
        data: the content of config.json.
        config: the configuration that transformers made of it.
        source: where the content comes from, for messages.

    Raises:
        LackingError: a key that is not in the lists above differs from the default of the family's configuration.
        ValueError: tokens attend to later ones.
    """
    if not getattr(config, "is_causal", True):
        raise ValueError(f"{source}: is_causal is false; attention to later tokens is not supported")
    defaults = type(config)().to_dict()
    others = sorted(data.keys() - KNOWN)
    changed = [name for name in others if name in defaults and getattr(config, name, None) != defaults[name]]
    if changed:
        named = ", ".join(f"{name} ({quote(data[name])}; the default is {quote(defaults[name])})" for name in changed)
        raise LackingError(
            f"{source}: this engine does not read {named}. It would compute other numbers than transformers, so such "
            "models are not supported"
        )
    if unknown := [name for name in others if name not in defaults]:
        # A key that is false, null or empty asks for nothing.
        level = logging.WARNING if any(data[name] for name in unknown) else logging.INFO
        _log_once(level, source, type(config).__name__, quote(", ".join(unknown)))


@cache
def _log_once(level: int, source: str, config_class: str, names: str) -> None:
    logger.log(level, "%s: keys without effect, which transformers' %s does not know: %s", source, config_class, names)
