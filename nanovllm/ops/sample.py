"""Samples n tokens from a matrix of logits, [n, vocab]. For each of the n tokens it draws a number u in (0, 1),
adds the probabilities in order of token id, and takes the first token at which the sum exceeds u. At temperature 0 it
draws nothing, and takes the most likely token.

Every backend follows the same rule:

1. Temperature 0 takes the most likely token; of equal ones, the lowest id. Otherwise z = (logits - max) / temperature.
2. top-k keeps the tokens whose z is at least the k-th largest z. Ties are kept. top_k = 0 is off.
3. top-p adds the weights exp(z) of the tokens that top-k kept, from the most likely down, until the sum is at least
   top_p times the total. Let t be the z of the token added last. All tokens with z >= t are kept. top_p = 1 is off.
4. min-p keeps the tokens whose exp(z) is at least min_p. exp(z) is the probability relative to the most likely token.
5. Philox4x32-10 makes a uniform number u in (0, 1) from the sequence's seed (the key) and the position of the sampled
   token (the counter). The generator has no state, so a sequence draws the same numbers in every batch, and also after
   a preemption. If its logits have the same bits, it also gets the same tokens. With the C++ kernels its logits always
   have the same bits; elsewhere rounding may differ. (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
   3".)
6. The token is the first one whose cumulative weight exceeds u * total. It is found in two levels: first the chunk of
   CHUNK tokens, then the token inside this chunk.

If the logits from which a token is sampled hold a NaN, +inf or nothing finite, they are no valid distribution. The
rules do not hold then: the result marks the token as failed, and has any token of the vocabulary in its place (see
`Sampled`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.engine.plan import FAILED, SAMPLING_COLUMNS
from nanovllm.utils.integers import ceil_div

CHUNK = 4096
"""The number of tokens in a chunk of rule 6."""


_MASK = 0xFFFFFFFF


class SamplingValues(NamedTuple):
    """The sampling parameters of n tokens that are sampled.

    Attributes:
        temperature, top_p, min_p: float32 [n].
        top_k: int32 [n].
        seeds: int64 [n].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    def select(self, indices: Tensor) -> "SamplingValues":
        """Return the values of some of the tokens, given their indices in any order."""
        return SamplingValues(*(values[indices] for values in self))

    def has_filter(self, vocab_size: int) -> Tensor:
        """Return bool [n]: whether top-k, top-p or min-p is on for each token."""
        return ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1) | (self.min_p > 0)


def unpack_sampling(packed: Tensor) -> SamplingValues:
    """Unpack rows of a table of sampling values.

    Args:
        packed: int32 [n, width], as ROW_SAMPLING in engine/plan.py says. A float is stored as its bits, and a seed as
            two halves.
    """

    def column(name: str) -> Tensor:
        return packed[:, SAMPLING_COLUMNS[name]]

    return SamplingValues(
        temperature=column("temperature").view(torch.float32),
        top_k=column("top_k"),
        top_p=column("top_p").view(torch.float32),
        min_p=column("min_p").view(torch.float32),
        seeds=(column("seed_low").long() & _MASK) | (column("seed_high").long() << 32),
    )


class Sampled(NamedTuple):
    """The sampled tokens in two forms, int32 [n] each.

    Attributes:
        token_ids: always a token of the vocabulary, so that the next step can compute with it.
        checked: the same ids, but FAILED where the logits were not a valid distribution. The host reads these.
    """

    token_ids: Tensor
    checked: Tensor


def store_samples_reference(token_ids: Tensor, rows: Tensor, last_token: Tensor) -> None:
    """Write token_ids int32 [n] to the places `rows` int32 [n] of last_token, where the rows' next decodes read them.

    If a row occurs more than once in `rows`, it keeps one of its tokens.
    """
    last_token[rows] = token_ids


def uniform_reference(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return (m + 0.5) / 2**23, float32 [n], where m is the upper 23 bits of the first word of Philox4x32-10.

    float32 holds m + 0.5 without rounding, so the result is never 0 or 1.

    Args:
        seeds: int64 [n], the 64 bits of the key.
        positions: int64 [n], the low word of the counter.
    """
    counter = [positions & _MASK, *(torch.zeros_like(positions) for _ in range(3))]
    key0 = seeds & _MASK
    key1 = (seeds >> 32) & _MASK
    for _ in range(10):
        product0 = counter[0] * 0xD2511F53  # may overflow; its low 64 bits are right
        product1 = counter[2] * 0xCD9E8D57
        counter = [
            ((product1 >> 32) & _MASK) ^ counter[1] ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ counter[3] ^ key1,
            product0 & _MASK,
        ]
        key0 = (key0 + 0x9E3779B9) & _MASK
        key1 = (key1 + 0xBB67AE85) & _MASK
    return ((counter[0] >> 9).to(torch.float32) + 0.5) * 2.0**-23


def clamp_top_k(top_k: Tensor, vocab_size: int) -> Tensor:
    """Return how many tokens top-k keeps, ties aside: all of the vocabulary where it is off."""
    return torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)


def filter_reference(z: Tensor, values: SamplingValues, host: SamplingValues | None = None) -> Tensor:
    """Return bool [n, vocab]: the tokens that rules 2 to 4 keep. z is float32 [n, vocab]; the largest of a row is 0.

    Args:
        host: the same values in the host's memory, so that nothing waits for the device.
    """
    host = values if host is None else host
    vocab_size = z.shape[1]
    top_p = values.top_p
    k = clamp_top_k(values.top_k, vocab_size)
    # Sorting 150,000 values takes 10 ms for one token. So only the largest values are sorted: as many as the largest k.
    # One row without top-k makes the largest k the whole vocabulary.
    # `descending` may lack a token whose z equals the k-th z. The last line compares every z, so it keeps that token.
    descending = z.topk(int(clamp_top_k(host.top_k, vocab_size).max()), dim=1).values
    kth = descending.gather(1, (k - 1).unsqueeze(1).long())
    threshold = kth
    if bool((host.top_p < 1).any()):
        weights = torch.where(descending >= kth, descending, -math.inf).exp()
        cumulative = weights.cumsum(1)
        total = torch.where(z >= kth, z, -math.inf).exp().sum(1, keepdim=True)
        # The index of the token at which the sum reaches top_p times the total: the one that is added last.
        crossing = (cumulative < top_p.unsqueeze(1) * total).sum(1, keepdim=True)
        crossing = crossing.clamp(max=descending.shape[1] - 1)
        at_crossing = descending.gather(1, crossing)
        threshold = torch.where(top_p.unsqueeze(1) < 1, torch.maximum(kth, at_crossing), kth)
    return (z >= threshold) & (z.exp() >= values.min_p.unsqueeze(1))


def _find_first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of the matrix `weights` the first index whose cumulative weight exceeds target [n], and the
    sum of the weights before that index.

    Rounding may leave the target at or above the total. Then the index is the last index with a weight above 0.
    """
    cumulative = weights.cumsum(1)
    n = weights.shape[1]
    last = n - 1 - (weights > 0).flip(1).to(torch.int8).argmax(1)
    index = torch.minimum((cumulative <= target.unsqueeze(1)).sum(1), last)
    before = cumulative.gather(1, (index - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return index, torch.where(index > 0, before, torch.zeros_like(before))


def sample_reference(logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Sampled:
    """Sample n tokens by the rule above.

    Args:
        logits: [n, vocab], of any float dtype.
        table: int32 [num_rows, width], the packed sampling values of all rows: see `unpack_sampling`.
        rows: int32 [n], the row of the table that says how each token is sampled.
        positions: int32 [n], for each sampled token its index in its sequence.
    """
    highest, greedy = logits.max(1)  # NaN counts as the highest of all
    token_ids = greedy.to(torch.int32)
    is_finite = highest.isfinite()
    values = unpack_sampling(table[rows])
    random = ((values.temperature > 0) & is_finite).nonzero().squeeze(1)
    if random.numel() == 0:
        return Sampled(token_ids, torch.where(is_finite, token_ids, FAILED))
    values = values.select(random)
    z = (logits[random].float() - highest[random].float().unsqueeze(1)) / values.temperature.unsqueeze(1)
    weights = z.exp()
    filtered = values.has_filter(z.shape[1]).nonzero().squeeze(1)
    if filtered.numel():
        kept = filter_reference(z[filtered], values.select(filtered))
        weights[filtered] = torch.where(kept, weights[filtered], 0.0)
    n, vocab_size = weights.shape
    num_chunks = ceil_div(vocab_size, CHUNK)
    chunks = torch.nn.functional.pad(weights, (0, num_chunks * CHUNK - vocab_size)).view(n, num_chunks, CHUNK)
    sums = chunks.sum(2)
    target = uniform_reference(values.seeds, positions[random].long()) * sums.sum(1)
    chunk, before = _find_first_above(sums, target)
    inside, _ = _find_first_above(chunks[torch.arange(n), chunk], target - before)
    token_ids[random] = (chunk * CHUNK + inside).to(torch.int32)
    return Sampled(token_ids, torch.where(is_finite, token_ids, FAILED))
