"""The token embedding and the LM head, sharded by vocabulary."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from nanovllm.models.layers.linear import MatrixModule
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, WeightTarget
from nanovllm.utils.integers import ceil_div


class VocabParallelEmbedding(MatrixModule):
    """Rows of the vocabulary, [start, start + length) on this rank. The last ranks' rows are padded with zeros."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = parallel
        length = ceil_div(vocab_size, parallel.size)
        self.start = parallel.share * length
        self.weight = nn.Parameter(torch.empty(length, hidden_size), requires_grad=False)
        self.num_real = max(0, min(length, vocab_size - self.start))
        self.weight[self.num_real :].zero_()
        self.weight.padding = (length - self.num_real) * hidden_size  # type: ignore[attr-defined]  # for the loader

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] -> embeddings [n, hidden], on every rank."""
        if self.parallel.size == 1:
            return self.lookup(token_ids)
        local = token_ids - self.start
        mine = (local >= 0) & (local < self.num_real)
        embedded = self.lookup(torch.where(mine, local, 0))
        return self.parallel.all_reduce(torch.where(mine.unsqueeze(1), embedded, 0))

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        shape = (self.vocab_size, self.weight.shape[1])
        rows = slice(self.start, self.start + self.num_real)
        yield f"{path}.weight", WeightTarget(self.weight[: self.num_real], shape, (rows, slice(None)))


class LMHead(VocabParallelEmbedding):
    """The same matrix in the other direction: from hidden states to logits."""

    def forward(self, hidden: Tensor) -> Tensor | None:  # type: ignore[override]
        """hidden [n, hidden] -> logits [n, vocab] on rank 0, None on the others."""
        logits = self.parallel.gather(self.multiply(hidden))
        return None if logits is None else logits[:, : self.vocab_size]
