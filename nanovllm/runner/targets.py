"""The targets of a step: prompt tokens whose log-probabilities are wanted, or whose hidden states."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.engine.plan import EMBED, NO_EMBEDDINGS, FloatArray, IntArray, StepPlan
from nanovllm.engine.token_scores import NO_SCORES, TokenScores
from nanovllm.models.decoder import Decoder
from nanovllm.runner.head_inputs import HeadInputs
from nanovllm.runner.logprobs import Logprobs, pair_logits


class Targets:
    """Computes the targets of a step: log-probabilities of tokens, and hidden states where a target is EMBED."""

    def __init__(self, head: HeadInputs, num_logprobs: IntArray, model: Decoder, backend: Backend) -> None:
        """Start to compute. The device may be at work when this returns.

        Args:
            num_logprobs: int32 [num_seqs], how many of the most likely tokens each sequence asks for, beside targets.
        """
        plan = head.plan
        assert head.target_indices is not None, "the plan has targets"
        indices = head.target_indices
        are_tokens = plan.targets != EMBED
        hidden = head.hidden
        self._scores: Logprobs | None = None
        self._embeddings: Tensor | None = None
        if not are_tokens.all():
            to_embed = backend.to_device(indices[~are_tokens])
            self._embeddings = backend.start_copy(hidden[to_embed].float())
        if are_tokens.any():
            counts = np.repeat(num_logprobs, plan.num_scored)[are_tokens]
            scoring = backend.to_device(indices[are_tokens])
            token_ids = backend.to_device(plan.targets[are_tokens])
            pieces = pair_logits(scoring, token_ids, lambda some: model.compute_logits(hidden[some]))
            self._scores = Logprobs(pieces, counts, backend)

    def read(self) -> tuple[TokenScores, FloatArray]:
        """Return the scores, and the hidden states, float32 [n, hidden], each in the plan's order.

        The device must have ended the step.
        """
        scores = NO_SCORES if self._scores is None else self._scores.read()
        return scores, NO_EMBEDDINGS if self._embeddings is None else self._embeddings.numpy()


def find_targets(plan: StepPlan) -> NDArray[np.intp]:
    """Return, for each of the plan's targets, the index of the token whose hidden state it needs."""
    num_scored = plan.num_scored
    firsts = plan.num_scheduled.cumsum() - plan.num_sampled - num_scored  # the first token of each that scores
    return np.arange(len(plan.targets)) + np.repeat(firsts - (num_scored.cumsum() - num_scored), num_scored)
