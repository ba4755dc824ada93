"""Reads how a folder of sentence-transformers scores pairs of texts, as its CrossEncoder does."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanovllm.utils.checks import as_choice, quote, refuse

Activation = Literal["softmax", "sigmoid", "none"]

ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "none",
}
"""By the names that CrossEncoder writes."""
OPENS = "add_generation_prompt"
LOGIT_SCORE = "LogitScore"
"""The module that compares the logits of two tokens."""


class PairFiles(NamedTuple):
    """
    Attributes:
        instruction: goes with each pair if the caller names no other; "" if there is none.
        options: arguments of the chat template.
        answers: the tokens that say that the document fits, and that it does not; None if the files do not name them.
        activation: makes a probability of a score; None if the files do not say.
    """

    instruction: str = ""
    options: Mapping[str, Any] = {}
    answers: tuple[int, int] | None = None
    activation: Activation | None = None


def read_pair_files(origin: Path | str) -> PairFiles:
    """Read the files of a folder. Without modules.json sentence-transformers reads none of them.

    Args:
        origin: the folder, or the name of a preset.

    Raises:
        ValueError: a file cannot be read, or asks for what CrossEncoder alone can do.
    """
    if not isinstance(origin, Path) or not (origin / "modules.json").is_file():
        return PairFiles()
    from nanovllm.models.model_config import read_json  # loads torch, as the next ones do: a job's lines need none

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
    return PairFiles(instruction, read_options(origin / "sentence_bert_config.json"), read_answers(origin), activation)


def read_options(path: Path) -> dict[str, Any]:
    """Return the arguments of the chat template that a module's file names. ValueError if it has other arguments."""
    from transformers import PreTrainedTokenizerBase

    from nanovllm.models.model_config import read_json

    given = (read_json(path) if path.exists() else {}).get("processing_kwargs") or {}
    options = given.get("chat_template", {}) if isinstance(given, dict) else None
    if not isinstance(options, dict) or given.keys() - {"chat_template"}:
        raise refuse(given, f"processing_kwargs in {path}", "an object with chat_template alone")
    own = {name: value for name, value in options.items() if name != "restore_suffix"}  # this one is for cut texts
    if taken := own.keys() & {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {OPENS}:
        raise refuse(sorted(taken), f"chat_template in {path}", f"variables of the template, and {OPENS}")
    return own


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
