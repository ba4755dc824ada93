"""Models that score whole texts: a linear layer on a hidden state takes the place of the LM head.

transformers calls them Qwen3ForSequenceClassification, say. A score is that layer's output for the last token that is
no padding. Reward models have one score, classifiers have one for each label, rerankers have one for a pair of texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.plan import FloatArray
from nanovllm.engine.pooling import Dense, Pooling
from nanovllm.features.scoring.embedding import EMBEDDING_PARAMS
from nanovllm.features.scoring.pair_files import ACTIVATIONS, Activation, read_pair_files
from nanovllm.models.model_folder import ModelFolder
from nanovllm.outputs import Classification, Output
from nanovllm.text.prompts import list_prompts, name_errors, tokenise_prompts
from nanovllm.utils.checks import as_choice, quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.engine.sequence import Request

PROBLEMS: dict[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""By config.json's problem_type."""


@dataclass(frozen=True)
class Head(Pooling):
    """Makes the scores of a text. Its only module is the linear layer.

    Attributes:
        activation: makes probabilities of scores.
        padding: the token id that does not count at the end of a text; None if there is none.
    """

    activation: Activation = "none"
    padding: int | None = None

    def strip(self, token_ids: Sequence[int]) -> list[int]:
        """Return a text up to the token that is scored: the last one that is no padding, as in transformers.

        Raises:
            ValueError: it has no such token.
        """
        end = len(token_ids)
        while end and token_ids[end - 1] == self.padding:
            end -= 1
        if not end and token_ids:
            raise ValueError(f"the prompt has no token but {self.padding}, the padding, which is never scored")
        return list(token_ids[:end])

    def activate(self, scores: FloatArray) -> FloatArray:
        """Return probabilities, float32 [labels]; the scores themselves if the model has no activation."""
        if self.activation == "none":
            return scores
        if self.activation == "sigmoid":
            chances: FloatArray = np.exp(-np.logaddexp(np.float32(0), -scores))
            return chances
        powers = np.exp(scores - scores.max())
        shares: FloatArray = powers / powers.sum()
        return shares


def read_head(folder: ModelFolder | None, config: "PretrainedConfig") -> Head:
    """Return the head of a folder; one of zeros if the weights are random, and nothing is read.

    Raises:
        ValueError: the folder has no head, or one that cannot be had.
    """
    num_labels = int(config.num_labels)
    shapes = {"weight": [num_labels, config.hidden_size], "bias": [num_labels]}
    tensors = {"weight": np.zeros(shapes["weight"], np.float32)} if folder is None else read_tensors(folder)
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if found not in (shapes, {"weight": shapes["weight"]}):
        raise ValueError(
            f"{folder}: the head has tensors of the shapes {found}; a linear layer for {num_labels} labels has "
            f"{shapes}, or no bias"
        )
    return Head(
        modules=(Dense(tensors["weight"], tensors.get("bias"), has_tanh=False),),
        size=num_labels,
        labels=tuple(read_labels(config)),
        activation=find_activation(config) if folder is None else read_activation(folder.path, config),
        padding=config.pad_token_id,
    )


def read_labels(config: "PretrainedConfig") -> list[str]:
    """Return the name of each score. ValueError if id2label does not number them from 0."""
    labels: dict[int, Any] = config.id2label
    if sorted(labels) != list(range(len(labels))):
        raise ValueError(
            f"id2label of config.json has the numbers {sorted(labels)}; it must have 0 to {len(labels) - 1}"
        )
    return [str(labels[i]) for i in range(len(labels))]


def read_tensors(folder: ModelFolder) -> dict[str, FloatArray]:
    """Return the tensors of a folder's head by the last part of their names, as float32.

    Raises:
        ValueError: it has none, or two heads, or one whose numbers are codes.
    """
    places = {name: path for name, path in folder.places.items() if name.partition(".")[0] in ("score", "classifier")}
    if not any(name.count(".") == 1 and name.endswith(".weight") for name in places):
        raise ValueError(f"{folder} has no tensor score.weight, the head of a model that scores texts")
    tensors = {}
    for name, path in places.items():
        with folder.open_tensors(path) as file:
            tensor = file.get_slice(name)[...]
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: the head's tensor {name} is of the type {tensor.dtype}; it must be of floats")
        tensors[name.partition(".")[2]] = tensor.float().numpy()
    if len(tensors) < len(places):
        raise ValueError(f"{folder} has two heads: {', '.join(sorted(places))}")
    return tensors


def read_activation(folder: Path, config: "PretrainedConfig") -> Activation:
    """Return what makes probabilities: as the files of sentence-transformers say, else as config.json does."""
    return read_pair_files(folder).activation or find_activation(config)


def find_activation(config: "PretrainedConfig") -> Activation:
    """Return what makes probabilities: as sentence-transformers or problem_type say, else as transformers' pipeline."""
    own = getattr(config, "sentence_transformers", None)
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        return ACTIVATIONS[as_choice(named, "the activation_fn of config.json", ACTIVATIONS)]
    problem = getattr(config, "problem_type", None)
    if problem is not None:
        return PROBLEMS[as_choice(problem, "problem_type of config.json", PROBLEMS)]
    return "sigmoid" if config.num_labels == 1 else "softmax"


def classify_prompts(llm: Any, prompts: Any, show: bool) -> list[Classification]:
    """Score every prompt by the model's head: see `LLM.classify`.

    Args:
        llm: the `LLM`.
        show: draw progress bars.
    """
    llm.engine.claim.check()
    requests = prepare_texts(llm, list_prompts(prompts), show=show)
    outputs = dict(llm.run_requests(requests, "Scoring", show))
    head = find_head(llm)
    return [read_classification(outputs[i], head) for i in range(len(outputs))]


def prepare_texts(llm: Any, prompts: Sequence[Any], *, kind: str = "prompt", show: bool = False) -> "list[Request]":
    """Return the requests for the scores of prompts. `read_classification` reads their outputs.

    Args:
        kind: what error messages call a prompt.
        show: draw a progress bar if tokenising takes longer than a second.

    Raises:
        ValueError: the model has no head, or a prompt is not valid.
    """
    head = find_head(llm)
    tokenised = tokenise_prompts(prompts, llm.engine.tokenizer, kind=kind, show=show, origin=llm.engine.facts.origin)
    texts = []
    for i, prompt in enumerate(tokenised):
        with name_errors(kind, i, len(tokenised)):
            texts.append(head.strip(prompt.token_ids))
    requests: list[Request] = llm.prepare_requests(texts, EMBEDDING_PARAMS, kind=kind)
    return requests


def reward_prompts(llm: Any, prompts: Any, show: bool) -> list[float]:
    """Return the only score of every prompt: see `LLM.reward`."""
    if (count := len(find_head(llm).labels)) != 1:
        raise ValueError(f"the model's head has {count} labels, and a reward is one score: use classify")
    return [float(one.scores[0]) for one in classify_prompts(llm, prompts, show)]


def find_head(llm: Any) -> Head:
    """Return the model's head; ValueError if it has none."""
    pooling = llm.engine.facts.pooling
    if not isinstance(pooling, Head):
        name = quote(llm.engine.config.model)
        raise ValueError(
            f"{name} has no head that scores texts: classify and reward need a model that is called "
            "...ForSequenceClassification, and rerank needs one, too, or a reranker that answers yes or no"
        )
    return pooling


def read_classification(output: Output, head: Head) -> Classification:
    """Read the scores of one prompt from its output; RuntimeError if the hidden state is NaN or infinite."""
    if output.error is not None:
        raise RuntimeError(output.error)
    scores: FloatArray = output["embedding"]
    probs = head.activate(scores)
    return Classification(
        probs=probs,
        scores=scores,
        label=head.labels[int(scores.argmax())],
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
