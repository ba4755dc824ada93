"""The token embedding and the LM head, sharded by vocabulary."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from nanovllm.layers.matrix import MatrixModule
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.weights import NamedTargets, WeightTarget


class VocabParallelEmbedding(MatrixModule):
    """Rank r holds rows [start, start + length) of the vocabulary, padded with zero rows where it does not divide."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.vocab_size, self.parallel = vocab_size, parallel
        length = -(-vocab_size // parallel.size)
        self.start = parallel.rank * length
        self.weight = nn.Parameter(torch.empty(length, hidden_size), requires_grad=False)
        self.num_real = max(0, min(length, vocab_size - self.start))
        self.weight[self.num_real :].zero_()
        self.weight.padding = (length - self.num_real) * hidden_size  # type: ignore[attr-defined]  # for the loader

    def forward(self, token_ids: Tensor) -> Tensor:
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
    """Logits of hidden states: [n, hidden] -> [n, vocab] on rank 0, None on the others."""

    def forward(self, hidden: Tensor) -> Tensor | None:  # type: ignore[override]  # the other direction
        logits = self.parallel.gather(self.multiply(hidden))
        return None if logits is None else logits[:, : self.vocab_size]
