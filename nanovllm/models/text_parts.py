"""Reads a model that takes pictures, too, as the text model that the text's part of it is.

Its positions are three numbers, of which pictures need all. In text the three are equal: the angles are those of plain
rope. transformers' classes for text alone have all else under the same names.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.utils.checks import quote


class Twin(NamedTuple):
    """The text model that a text's part is.

    Attributes:
        text_class: the name of transformers' class of the part's configuration.
        architecture: the text model's.
        always: values of the text model's configuration that the part has, whatever config.json says.
    """

    text_class: str
    architecture: str
    always: Mapping[str, Any] = MappingProxyType({})


QWEN2_VL = Twin("Qwen2VLTextConfig", "Qwen2ForCausalLM")
QWEN2_5_VL = Twin("Qwen2_5_VLTextConfig", "Qwen2ForCausalLM")
GLM4V = Twin("Glm4vTextConfig", "Glm4ForCausalLM", {"attention_bias": True})
GLM4V_MOE = Twin("Glm4vMoeTextConfig", "Glm4MoeForCausalLM", {"use_qk_norm": False})
TWINS = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_5_vl_text": QWEN2_5_VL,
    "qwen3_vl_text": Twin("Qwen3VLTextConfig", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": Twin("Qwen3VLMoeTextConfig", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "glm4v": GLM4V,
    "glm4v_text": GLM4V,
    "glm4v_moe": GLM4V_MOE,
    "glm4v_moe_text": GLM4V_MOE,
}
"""By the type of a model, or of its text's part: older files have no nested part."""

STAND_INS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    *("audio_token_id", "audio_token_index"),
)
"""The keys of config.json with a token id that stands for a picture, a video or a sound in a prompt."""

OF_PICTURES = re.compile("^(vision|image|video)_|^mrope_")
"""The beginnings of keys that say nothing of the text's part."""


def read_as_text(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a config.json as a text model has it, if it is one of `TWINS`; else as it is.

    Args:
        data: the content of config.json, without nested parts: see `take_text_config`.
        source: where it comes from, for messages.

    Raises:
        ValueError: transformers' class refuses it.
    """
    import transformers

    named = data.get("architectures")
    has_pictures = isinstance(named, list) and any(str(name).endswith("ForConditionalGeneration") for name in named)
    kind = data.get("model_type")
    if not has_pictures or not isinstance(kind, str) or kind not in TWINS:
        return dict(data)
    twin = TWINS[kind]
    kept = {name: data[name] for name in ("dtype", "torch_dtype", "quantization_config", *STAND_INS) if name in data}
    try:
        text: Any = getattr(transformers, twin.text_class).from_dict({k: v for k, v in data.items() if k not in kept})
    except Exception as error:  # transformers validates with exceptions of many libraries
        told = " ".join(str(error).split())
        raise ValueError(f"{source} is not a valid configuration of {quote(kind)}: {told}") from error
    twin_class = getattr(transformers, twin.architecture).config_class
    known = twin_class().to_dict().keys()
    part = type(text)().to_dict().keys()  # `text` also has keys that its class does not know
    values = {name: value for name, value in text.to_dict().items() if name in part & known}
    rope = {name: value for name, value in text.rope_parameters.items() if not OF_PICTURES.search(name)}
    rope.setdefault("partial_rotary_factor", 1.0)
    own = {
        "architectures": [twin.architecture],
        "model_type": twin_class.model_type,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "rope_parameters": rope,
    }
    read = known | part | {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    unread = {name: value for name, value in data.items() if name not in read and not OF_PICTURES.search(name)}
    return {**unread, **values, **own, **twin.always, **kept}
