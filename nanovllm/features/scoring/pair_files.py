"""Reads how a folder of sentence-transformers scores pairs of texts, as its CrossEncoder does."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanovllm.utils.checks import as_bool, as_choice, quote, refuse

Activation = Literal["softmax", "sigmoid", "none"]

ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "none",
}
"""By the names that CrossEncoder writes."""
NEUTRAL = {"do_lower_case": False}
"""Keys of the Transformer's file that change texts, each with the only value that can be had."""
OF_TEXTS = {"method": "forward", "method_output_name": "logits"}
"""How CrossEncoder has the model called, both for texts and for what a template writes."""
OPENS = "add_generation_prompt"
MOST_TOKENS = 1 << 31
"""transformers' limit is above it where there is none."""
LOGIT_SCORE = "LogitScore"
"""The module that compares the logits of two tokens."""


class PairFiles(NamedTuple):
    """
    Attributes:
        instruction: goes with each pair if the caller names no other; "" if there is none.
        options: arguments of the chat template.
        has_template: whether a chat template writes a pair; None: if there is one. Else the tokenizer joins the texts.
        max_tokens: a longer pair is cut to so many tokens; None for no limit.
        keeps_ending: whether a pair that is cut keeps what the template writes at its end.
        answers: the tokens that say that the document fits, and that it does not; None if the files do not name them.
        activation: makes a probability of a score; None if the files do not say.
    """

    instruction: str = ""
    options: Mapping[str, Any] = {}
    has_template: bool | None = None
    max_tokens: int | None = None
    keeps_ending: bool = True
    answers: tuple[int, int] | None = None
    activation: Activation | None = None


def read_pair_files(origin: Path | str) -> PairFiles:
    """Read the files of a folder. Without modules.json sentence-transformers reads those of the model alone.

    Args:
        origin: the folder, or the name of a preset.

    Raises:
        ValueError: a file cannot be read, or asks for what CrossEncoder alone can do.
    """
    if not isinstance(origin, Path) or not origin.is_dir():
        return PairFiles()
    from nanovllm.features.scoring.pooling_files import read_max_tokens, read_transformer
    from nanovllm.models.model_config import read_json  # loads torch, as the last ones do: a job's lines need none

    has_modules = (origin / "modules.json").is_file()
    data = read_transformer(origin, NEUTRAL) if has_modules else {}
    max_tokens = read_max_tokens(origin, data)
    if data.get("max_seq_length") is None:
        path = origin / "config.json"
        positions = (read_json(path) if path.exists() else {}).get("max_position_embeddings")
        limits = [limit for limit in (max_tokens, positions) if isinstance(limit, int) and 0 < limit < MOST_TOKENS]
        max_tokens = min(limits, default=None)
    if not has_modules:
        return PairFiles(max_tokens=max_tokens)

    path = origin / "config_sentence_transformers.json"
    settings = read_json(path) if path.exists() else {}
    name = settings.get("default_prompt_name")
    prompts = settings.get("prompts") or {}
    instruction = "" if name is None else prompts.get(str(name)) if isinstance(prompts, dict) else None
    if not isinstance(instruction, str):
        raise ValueError(f"{path}: default_prompt_name is {quote(name)}, and prompts are {quote(prompts)}")
    activation = settings.get("activation_fn")
    if activation is not None:
        activation = ACTIVATIONS[as_choice(activation, f"activation_fn in {path}", ACTIVATIONS)]
    source = origin / "sentence_bert_config.json"
    options = read_options(data, source)
    keeps_ending = as_bool(options.pop("restore_suffix", True), f"restore_suffix in {source}")
    return PairFiles(
        instruction,
        options,
        read_modalities(data, source),
        max_tokens,
        keeps_ending,
        read_answers(origin),
        activation,
    )


def read_modalities(data: Mapping[str, Any], source: Path) -> bool | None:
    """Return whether the Transformer's file says that a template writes what the model reads; None if it does not say.

    Raises:
        ValueError: the model is to be called in another way than with texts, for its logits.
    """
    kinds = data.get("modality_config")
    if kinds is None:
        return None
    forms = [kinds.get(name) for name in ("text", "message") if name in kinds] if isinstance(kinds, dict) else []
    if not forms or any(not isinstance(form, dict) or not OF_TEXTS.items() <= form.items() for form in forms):
        raise refuse(kinds, f"modality_config in {source}", f'"text" or "message", each with {quote(OF_TEXTS)}')
    return "message" in kinds


def read_options(data: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the arguments of the chat template in the Transformer's file. ValueError if it has other arguments."""
    from transformers import PreTrainedTokenizerBase

    given = data.get("processing_kwargs") or {}
    options = given.get("chat_template", {}) if isinstance(given, dict) else None
    if not isinstance(options, dict) or given.keys() - {"chat_template"}:
        raise refuse(given, f"processing_kwargs in {source}", "an object with chat_template alone")
    if taken := options.keys() & {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {OPENS}:
        raise refuse(sorted(taken), f"chat_template in {source}", f"variables of the template, and {OPENS}")
    return {**options}


def read_answers(folder: Path) -> tuple[int, int] | None:
    """Return the two tokens that a folder's LogitScore compares; None if it has no such module."""
    from nanovllm.features.scoring.pooling_files import read_modules
    from nanovllm.models.model_config import read_json

    kinds, paths = read_modules(folder / "modules.json")
    if LOGIT_SCORE not in kinds:
        return None
    path = paths[kinds.index(LOGIT_SCORE)] / "config.json"
    found = read_json(path)
    true = found.get("true_token_id")
    false = found.get("false_token_id")
    if type(true) is not int or type(false) is not int:
        raise refuse([true, false], f"true_token_id and false_token_id in {path}", "two token ids")
    return true, false
