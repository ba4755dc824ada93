"""Sampling by inversion: one uniform number a row, then the inverse of the cumulative distribution in token order.

The rule, the same in every backend:

1. temperature 0 takes the most likely token (the lowest id of equals); otherwise z = (logits - max) / temperature.
2. top-k keeps the tokens whose z is at least the k-th largest (ties are kept); 0 is off.
3. top-p, over the mass that top-k left, keeps the tokens whose z is at least that of the token at which the mass,
   summed from the most likely down, first reaches p (that token and its ties are kept); 1 is off.
4. min-p keeps the tokens of which exp(z) is at least min_p: the probability relative to the most likely token.
5. u in (0, 1) comes from Philox4x32-10, keyed by the request's seed, with the position of the sampled token as the
   counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no state, so a request draws the same
   numbers whatever else is in its batch, preempted or not.
6. The token is the first whose cumulative weight exceeds u * total, found in two levels: CHUNK tokens at a time, then
   inside one chunk.
"""

import math

import torch
from torch import Tensor

CHUNK = 4096

_MASK = 0xFFFFFFFF


def uniform_reference(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float32 in (0, 1) a row: the first word of Philox4x32-10, its upper 23 bits centred in their interval.

    seeds int64 [n] (the 64 key bits), positions int64 [n] (the low counter word). 23 bits and a half are exact in
    float32, so neither 0 nor 1 can come out.
    """
    counter = [positions & _MASK, *(torch.zeros_like(positions) for _ in range(3))]
    key0, key1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(10):
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # wraps in int64: the bits are right
        counter = [
            ((product1 >> 32) & _MASK) ^ counter[1] ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ counter[3] ^ key1,
            product0 & _MASK,
        ]
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return ((counter[0] >> 9).to(torch.float32) + 0.5) * 2.0**-23


def filter_reference(z: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The mask of kept tokens, bool [n, vocab], for scaled logits z float32 [n, vocab] with maximum 0 in each row."""
    vocab_size = z.shape[1]
    k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    # Sorting 150,000 values is 10 ms a row: where every row has a small k, the largest k values are all that counts.
    # One more than k would not do for ties, so tied values beyond the k-th are summed by `count` below.
    descending = z.topk(int(k.max()), dim=1).values
    kth = descending.gather(1, (k - 1).unsqueeze(1).long())
    threshold = kth
    if bool((top_p < 1).any()):
        weights = torch.where(descending >= kth, descending, -math.inf).exp()
        cumulative = weights.cumsum(1)
        total = torch.where(z >= kth, z, -math.inf).exp().sum(1, keepdim=True)
        crossing = (cumulative < top_p.unsqueeze(1) * total).sum(1, keepdim=True)
        crossing = crossing.clamp(max=descending.shape[1] - 1)
        at_crossing = descending.gather(1, crossing)
        threshold = torch.where(top_p.unsqueeze(1) < 1, torch.maximum(kth, at_crossing), kth)
    return (z >= threshold) & (z.exp() >= min_p.unsqueeze(1))


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the first index whose cumulative weight exceeds target [n], and the weight before that index.

    Rounding may leave the target at or above the total: then it is the last index with a weight.
    """
    cumulative = weights.cumsum(1)
    n = weights.shape[1]
    last = n - 1 - (weights > 0).flip(1).to(torch.int8).argmax(1)
    index = torch.minimum((cumulative <= target.unsqueeze(1)).sum(1), last)
    before = cumulative.gather(1, (index - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return index, torch.where(index > 0, before, torch.zeros_like(before))


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample one token a row by the rule above.

    logits [n, vocab] of any float dtype; temperature, top_p, min_p float32 [n]; top_k int32 [n]; seeds int64 [n];
    positions [n], the index in its sequence of the token to be sampled. Returns int32 [n].
    """
    greedy = logits.argmax(1).to(torch.int32)
    random = (temperature > 0).nonzero().squeeze(1)
    if random.numel() == 0:
        return greedy
    logits, top_k, top_p, min_p = logits[random].float(), top_k[random], top_p[random], min_p[random]
    z = (logits - logits.amax(1, keepdim=True)) / temperature[random].unsqueeze(1)
    weights = z.exp()
    filtered = (((top_k > 0) & (top_k < z.shape[1])) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    if filtered.numel():
        kept = filter_reference(z[filtered], top_k[filtered], top_p[filtered], min_p[filtered])
        weights[filtered] = torch.where(kept, weights[filtered], 0.0)
    n, vocab_size = weights.shape
    num_chunks = -(-vocab_size // CHUNK)
    chunks = torch.nn.functional.pad(weights, (0, num_chunks * CHUNK - vocab_size)).view(n, num_chunks, CHUNK)
    sums = chunks.sum(2)
    target = uniform_reference(seeds[random], positions[random].long()) * sums.sum(1)
    chunk, before = _first_above(sums, target)
    inside, _ = _first_above(chunks[torch.arange(n), chunk], target - before)
    greedy[random] = (chunk * CHUNK + inside).to(torch.int32)
    return greedy
