"""Inputs for the kernels' tests, poisoned wherever a kernel must not look; used on the CPU and on a GPU alike."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from unittest import mock

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.backends import Backend, KVCache, make_backend
from nanovllm.engine.plan import ROW_SAMPLING
from nanovllm.ops.attention import AttentionVariant, attend_reference
from nanovllm.ops.norm_rope_store import store_kv_reference
from nanovllm.ops.sample import (
    Sampled,
    SamplingValues,
    filter_reference,
    sample_reference,
    uniform_reference,
    unpack_sampling,
)
from nanovllm.ops.step_inputs import StepInputs, step_inputs_reference
from nanovllm.ops.token_logprobs import TokenLogprobs, token_logprobs_reference

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

HEAD_DIMS = (32, 64, 128)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
BLOCK_SIZES = (16, 64, 256)
WIDE_SHAPES = [(256, 4, 64, torch.float32), (256, 6, 16, torch.float16)]
"""Heads of 256, which Qwen3.5 has, by group, block size and dtype. Few: the interpreter takes seconds for each."""
CODE_SHAPES = [
    (32, 3, 16, torch.float32, torch.int8),
    (64, 7, 64, torch.float16, torch.int8),
    (128, 2, 256, torch.float16, torch.int8),
    (256, 4, 64, torch.float32, torch.int8),
    (64, 2, 64, torch.float32, torch.float8_e4m3fn),
    (128, 8, 16, torch.float16, torch.float8_e4m3fn),
]
"""The same with a cache of codes, whose type comes last."""
VARIANTS = [
    (32, 1, 16, torch.float32, torch.float32, 7, None, False),  # less than a tile
    (64, 8, 64, torch.float32, torch.float32, None, None, True),
    (128, 3, 64, torch.float32, torch.float32, None, 2.0, False),
    (32, 4, 16, torch.float16, torch.int8, 50, None, True),
    (64, 2, 64, torch.float16, torch.float16, 64, 3.0, True),  # a block
    (64, 2, 64, torch.float32, torch.float8_e4m3fn, 100, 1.5, True),
    (256, 2, 16, torch.float32, torch.float32, 16, 2.0, False),  # a tile
    (128, 16, 64, torch.float16, torch.int8, 5000, 2.5, True),  # more than any sequence
]
"""Shapes with a type of the cache, as CODE_SHAPES; then a window, a soft cap, and whether there are sinks."""
HALF = torch.float16  # Triton's interpreter does no arithmetic in bfloat16


def pairwise_shapes(*dtypes: torch.dtype) -> list[tuple[int, int, int, torch.dtype]]:
    """(head_dim, group, block_size, dtype) such that every pair of values of any two of them occurs."""
    return [
        (head_dim, group, BLOCK_SIZES[(i + j) % 3], dtypes[(2 * i + j + i // 3) % len(dtypes)])
        for (i, group), (j, head_dim) in product(enumerate(GROUPS), enumerate(HEAD_DIMS))
    ]


def few_shapes(*dtypes: torch.dtype) -> list[tuple[int, int, int, torch.dtype]]:
    """(head_dim, group, block_size, dtype) such that every group occurs once, and every other value several times."""
    return [
        (HEAD_DIMS[i % 3], group, BLOCK_SIZES[(i + i // 3) % 3], dtypes[i % len(dtypes)])
        for i, group in enumerate(GROUPS)
    ]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty gives with NaN (floats) and the largest value (integers): nobody may rely on it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_inputs(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Tensor | None = None,
    rows: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> StepInputs:
    """The inputs of a step, as far as attention and its like read them. Nothing is stored."""
    num_seqs = len(query_lens)
    num_tokens = sum(query_lens)
    offsets = np.repeat(np.asarray(seq_lens) - np.cumsum(query_lens), query_lens)
    nothing = torch.zeros(num_seqs, 1, dtype=torch.int32, device=device)
    return StepInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=torch.from_numpy(offsets + np.arange(num_tokens)).to(device, torch.int32),
        slots=torch.full((num_tokens,), -1, device=device),
        cu_seqlens=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=nothing if block_tables is None else block_tables,
        rows=torch.tensor(range(num_seqs) if rows is None else rows, dtype=torch.int32, device=device),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), num_seqs),
        query_lens_cpu=np.asarray(query_lens, np.int32),
        seq_lens_cpu=np.asarray(seq_lens, np.int32),
    )


@dataclass(frozen=True)
class AttentionCase:
    """One step of one layer."""

    q: Tensor
    cache: KVCache
    inputs: StepInputs
    scale: float
    variant: AttentionVariant | None = None

    def attend(self, backend: Backend) -> Tensor:
        with poisoned_memory():
            inputs = backend.prepare_attention(self.inputs, self.cache, self.q.shape[1])
            return backend.attend(self.q, self.cache, inputs, self.scale, self.variant)

    def expected(self) -> Tensor:
        """The reference in float32 on the same values. Padding rows (length 0) are NaN: nothing is expected of them."""
        real = self.inputs.seq_lens_cpu > 0
        kept = torch.from_numpy(np.repeat(real, self.inputs.query_lens_cpu)).to(self.q.device)
        mask = torch.from_numpy(real).to(self.q.device)
        inputs = replace(
            self.inputs,
            block_tables=self.inputs.block_tables[mask],
            query_lens_cpu=self.inputs.query_lens_cpu[real],
            seq_lens_cpu=self.inputs.seq_lens_cpu[real],
        )
        has_codes = self.cache.key_scales is not None
        cache = self.cache if has_codes else KVCache(*(side.float() for side in self.cache[:2]))
        out = torch.full(self.q.shape, float("nan"), device=self.q.device)
        with sdpa_kernel(SDPBackend.MATH):  # on a GPU the others multiply float32 in fewer bits
            out[kept] = attend_reference(self.q[kept].float(), cache, inputs, self.scale, self.variant)
        return out


def attention_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    num_kv_heads: int = 2,
    backend: Backend | None = None,
    device: torch.device = DEVICE,
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionCase:
    """Sequences in shuffled blocks. NaN everywhere else: in free blocks, to which the unused entries of the tables
    point, in the slots beyond each sequence, and beside q in its rows. Codes of int8 are 77 there, with scales of NaN.

    kv_dtype is the type of the cache; None: dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(needed) + 1
    order = torch.randperm(num_blocks, generator=generator)
    free = int(order[-1])
    tables = torch.full((len(seq_lens), max(*needed, 1) + 1), free, dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    cache = (backend or make_backend("torch", device)).allocate_cache(shape, kv_dtype or dtype, device)
    for part in cache:
        if part is not None:
            part.fill_(77 if part.dtype == torch.int8 else float("nan"))
    taken = 0
    for i, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
        blocks = order[taken : taken + count]
        tables[i, :count] = blocks.int()
        taken += count
        token = torch.arange(length)
        keys, values = (torch.randn(length, num_kv_heads, head_dim, generator=generator) for _ in "kv")
        slots = blocks[token // block_size] * block_size + token % block_size
        store_kv_reference(keys.to(device, dtype), values.to(device, dtype), cache, slots.to(device))
    num_heads = group * num_kv_heads
    qkv = torch.full((sum(query_lens), (num_heads + 2 * num_kv_heads) * head_dim), float("nan"))
    qkv[:, : num_heads * head_dim] = torch.randn(len(qkv), num_heads * head_dim, generator=generator)
    q = qkv.to(device, dtype)[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    inputs = make_inputs(query_lens, seq_lens, tables.to(device), device=device)
    return AttentionCase(q, cache, inputs, head_dim**-0.5)


def vary_case(case: AttentionCase, window: int | None, softcap: float | None, has_sinks: bool) -> AttentionCase:
    """The same step in a layer with a variant of attention. Sinks are about as large as scores."""
    sinks = randn(case.q.shape[1], seed=3).to(case.q.device) if has_sinks else None
    return replace(case, variant=AttentionVariant(window, softcap, sinks))


@contextmanager
def give_variant(variant: AttentionVariant | None) -> Iterator[None]:
    """Within, every layer of every model has this variant of attention, in plain torch and in our Triton kernels."""
    from nanovllm.backends.gpu.triton_backend import TritonKernels

    attend = TritonKernels.attend
    if variant is None:
        yield
        return
    given = variant

    def attend_torch(q: Tensor, cache: KVCache, inputs: StepInputs, scale: float, _: object = None) -> Tensor:
        return attend_reference(q, cache, inputs, scale, given)

    def attend_triton(
        self: TritonKernels, q: Tensor, cache: KVCache, inputs: StepInputs, scale: float, _: object = None
    ) -> Tensor:
        if "variant" not in vars(self):  # the first step is no capture, which may not copy from the host
            sinks = None if given.sinks is None else given.sinks.to(q.device)
            vars(self)["variant"] = given._replace(sinks=sinks)
        return attend(self, q, cache, inputs, scale, vars(self)["variant"])

    with (
        mock.patch.object(Backend, "attend", staticmethod(attend_torch)),
        mock.patch.object(TritonKernels, "attend", attend_triton),
    ):
        yield


def decode_lengths(block_size: int, longest: int = 2100) -> list[int]:
    """Lengths at the edges of blocks, padding, and one long enough to be split."""
    return [1, block_size - 1, block_size, 0, block_size + 1, longest]


def mixed_lengths(block_size: int, longest: int = 1 << 30) -> tuple[list[int], list[int]]:
    """(query_lens, seq_lens): decodes, then prefills without a prefix, and with prefixes that end at a block's edge.

    One of the prefills has half of a block's tokens and one, and another one 33; but at most `longest`.

    After block_size - 2 keys the first new token sees all but one of a block: one key too many would be noticed.
    """
    query_lens = [1, 1, 2, min(block_size // 2 + 1, longest), min(33, longest)]
    prefix_lens = [block_size - 1, 40, 0, block_size - 2, block_size]
    return query_lens, [q + p for q, p in zip(query_lens, prefix_lens, strict=True)]


def assert_attends(case: AttentionCase, backend: Backend, tolerance: float) -> None:
    """The backend's output is the reference's to tolerance, and finite where it is padding."""
    got = case.attend(backend).float()
    expected = case.expected()
    assert torch.isfinite(got).all()
    real = ~expected.isnan()
    torch.testing.assert_close(got[real], expected[real], atol=tolerance, rtol=0)


def attention_tolerance(dtype: torch.dtype) -> float:
    """Outputs are averages of standard normals, so at most about 4.

    float32: sums of a few thousand terms in another order, some 10 units in the last place of 1 (1e-7).
    16-bit types: the softmax weights and the output are both rounded, so two units of 4's last place.
    """
    return 4e-6 if dtype == torch.float32 else 2 * 4 * torch.finfo(dtype).eps / 2


def pack_values(count: int, seeds: ArrayLike = 0, **values: ArrayLike) -> Tensor:
    """Pack sampling values of `count` rows as a plan does: int32 [count, width]. By default nothing is filtered."""
    table = np.zeros(count, ROW_SAMPLING)
    for name, value in {"temperature": 1, "top_p": 1, **values}.items():
        table[name] = value
    halves = np.broadcast_to(np.asarray(seeds, np.int64), count).astype("<i8").view("<u4").reshape(count, 2)
    table["seed_low"], table["seed_high"] = halves.T
    return torch.from_numpy(table.view(np.int32).reshape(count, -1))


@dataclass(frozen=True)
class SampleCase:
    """Arguments of `sample`, one row of logits for each kind of request. The rows of the table have another order."""

    logits: Tensor
    table: Tensor
    rows: Tensor
    positions: Tensor

    def select(self, *requests: int) -> "SampleCase":
        """Return the rows of some of _REQUESTS alone: Triton's interpreter takes half a second for a row."""
        kept = torch.tensor(requests, device=self.logits.device)
        return SampleCase(self.logits[kept], self.table, self.rows[kept], self.positions[kept])

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.logits, self.table, self.rows, self.positions

    @property
    def values(self) -> SamplingValues:
        return unpack_sampling(self.table[self.rows])


# temperature, top_k, top_p, min_p
_REQUESTS = (
    (0.0, 0, 1.0, 0.0),  # greedy
    (0.0, 5, 0.5, 0.5),  # greedy, whatever its filters
    (1.0, 0, 1.0, 0.0),  # no filter
    (0.3, 0, 1.0, 0.0),
    (5.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),  # one token, or its ties
    (1.0, 50, 1.0, 0.0),
    (1.5, 7, 0.9, 0.0),
    (1.0, 1 << 30, 1.0, 0.0),  # k beyond the vocabulary is off
    (1.0, 0, 1e-6, 0.0),  # only the most likely
    (2.0, 0, 0.5, 0.0),
    (1.0, 0, 0.999, 0.0),
    (0.7, 20, 0.8, 0.05),
    (1.0, 0, 1.0, 1.0),  # only the most likely and its ties
    (3.0, 0, 1.0, 0.2),
    (1e-3, 3, 0.5, 0.1),
)


def sample_case(
    vocab_size: int, dtype: torch.dtype, ties: bool = False, device: torch.device = DEVICE, seed: int = 0
) -> SampleCase:
    """Every request above on its own row; with ties, the logits are a few small integers."""
    generator = torch.Generator().manual_seed(seed)
    n = len(_REQUESTS)
    logits = 3 * torch.randn(n, vocab_size, generator=generator)
    if ties:
        logits = logits.div(2).round() * 2
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*_REQUESTS, strict=True))
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    values = pack_values(n, seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = torch.randperm(n + 2, generator=generator)[:n]
    table = torch.full((n + 2, values.shape[1]), -1, dtype=torch.int32)
    table[rows] = values
    positions = torch.arange(n, dtype=torch.int32, device=device) * 1009
    return SampleCase(logits.to(device, dtype), table.to(device), rows.to(device, torch.int32), positions)


def assert_same_tokens(case: SampleCase, sampled: Sampled) -> None:
    """The reference's tokens, exactly on the CPU, and near them on a GPU."""
    if case.logits.device.type != "cpu":
        assert_tokens_near(case, sampled)
        return
    assert torch.equal(sampled.checked, sampled.token_ids)
    assert torch.equal(sampled.token_ids, sample_reference(*case.arguments()).token_ids)


def assert_tokens_near(case: SampleCase, sampled: Sampled) -> None:
    """The reference's tokens, or such whose range of u ends where the sums' rounding may move it.

    On a GPU exp is approximate, and everywhere sums may run in another order: about 1e-6 of the total. So u may fall on
    the other side of a boundary between two tokens, or top-p take one token more or less. A differing token must then
    lie that near. The exact cases of the CPU tests have seeds for which no u lies there; random seeds find such.
    """
    expected = sample_reference(*case.arguments()).token_ids
    tokens = sampled.token_ids
    assert torch.equal(sampled.checked, tokens)
    values = case.values
    uniforms = uniform_reference(values.seeds, case.positions.long())
    for row in (tokens != expected).nonzero().flatten().tolist():
        assert values.temperature[row] > 0, "greedy tokens are exact"
        logits = case.logits[row : row + 1].float()
        z = (logits - logits.max()) / values.temperature[row]
        kept = filter_reference(z, values.select(torch.tensor([row], device=z.device)))[0]
        shares = torch.where(kept, z[0].double().exp(), 0.0)
        shares /= shares.sum()
        slack = 1e-5 + (2 * float(shares[kept].min()) if values.top_p[row] < 1 else 0.0)
        token = int(tokens[row])
        end = float(shares[: token + 1].sum())
        assert end - float(shares[token]) - slack <= float(uniforms[row]) <= end + slack, (row, token)


LARGEST_UNIFORM = 16390493
"""A seed with which the number that is drawn at position 0 is the largest of all, 1 - 2**-24."""


def check_edges_of_sampling(sample: Callable[..., Sampled], num_rows: int = 36, device: torch.device = DEVICE) -> None:
    """At the edges of rules 2, 3 and 6: the tokens are those of a plain search in float64."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    seeds = torch.arange(num_rows)
    for vocab_size in (3, 17):
        # Top-k keeps all tokens but the least likely, or all. Each is drawn by some row.
        logits = -0.3 * torch.stack([torch.randperm(vocab_size, generator=torch.Generator().manual_seed(3))] * num_rows)
        top_k = vocab_size - 1 + seeds % 3
        table = pack_values(num_rows, seeds, top_k=top_k).to(device)
        tokens = sample(logits.to(device), table, rows, rows).token_ids.cpu()
        expected = []
        for row in range(num_rows):
            weights = logits[row].double().exp()
            weights[logits[row] < logits[row].sort(descending=True).values[: int(top_k[row])].min()] = 0
            goal = float(uniform_reference(seeds[row : row + 1], rows[row : row + 1].cpu().long())) * weights.sum()
            expected.append(int((weights.cumsum(0) > goal).nonzero()[0]))
        assert tokens.tolist() == expected
        assert vocab_size > 3 or logits[0].argmin() in tokens
    # The weights are 1, 0.5 and 0.5, so half of the mass is the first token's, exactly.
    logits = torch.tensor([0.0, math.log(0.5), math.log(0.5)]).repeat(num_rows, 1)
    table = pack_values(num_rows, seeds, top_p=0.5).to(device)
    assert not sample(logits.to(device), table, rows, rows).token_ids.any()
    # So near 1 the sum of the chunk and that of its tokens may lie on different sides of the drawn number.
    logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(5))
    logits[:, -9:] = -math.inf
    table = pack_values(num_rows, LARGEST_UNIFORM).to(device)
    tokens = sample(logits.to(device), table, rows, torch.zeros_like(rows)).token_ids
    assert ((tokens > 200) & (tokens < 291)).all()


def check_token_logprobs(
    compute: Callable[[Tensor, Tensor], TokenLogprobs],
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device = DEVICE,
) -> None:
    """The reference's log-probabilities, of ordinary rows and of broken ones."""
    generator = torch.Generator().manual_seed(0)
    logits = (
        8 * torch.randn(70, vocab_size + 3, generator=generator).to(device, dtype)[:, :vocab_size]
    )  # rows lie apart
    logits[1] -= 300  # below what exp takes without its row's maximum
    logits[2, : vocab_size // 2] = -torch.inf  # whole blocks, in the longest rows
    logits[3] += 300
    token_ids = torch.arange(70, dtype=torch.int32, device=device) * 977 % vocab_size
    token_ids[4] = -1  # padding
    logits[5, -1] = torch.nan
    logits[6, 0] = torch.inf
    logits[7] = -torch.inf
    # Logarithms of sums of up to 9,001 terms in another order: 1e-6 relative in the sum, beside logits of up to 330.
    for ours, theirs in zip(compute(logits, token_ids), token_logprobs_reference(logits, token_ids), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=4e-6, equal_nan=True)


def check_step_inputs(
    make: Callable[..., StepInputs],
    scheduled: list[int],
    device: torch.device = DEVICE,
) -> None:
    """The reference's inputs of a step that computes so many tokens of each sequence. The first row is padding."""
    num_seqs = len(scheduled)
    num_rows = 9
    generator = torch.Generator().manual_seed(0)
    block_tables = torch.randint(0, 99, (num_rows, 50), generator=generator, dtype=torch.int32).to(device)
    last_token = torch.randint(0, 1000, (num_rows,), generator=generator, dtype=torch.int32).to(device)
    rows = torch.randperm(num_rows - 1, generator=generator)[:num_seqs].int()
    rows[0] = num_rows - 1
    token_ids = torch.randint(0, 1000, (sum(scheduled),), generator=generator, dtype=torch.int32)
    token_ids[:2] = -1
    token_ids[2] = 0  # the smallest token is no mark
    computed = torch.randint(0, 200, (num_seqs,), generator=generator, dtype=torch.int32)
    arrays = rows, computed, torch.tensor(scheduled, dtype=torch.int32), token_ids
    given = (*(array.to(device) for array in arrays), block_tables, last_token, 16)
    got = make(*given)
    expected = step_inputs_reference(*given)
    for field in fields(StepInputs):
        ours, theirs = (getattr(inputs, field.name) for inputs in (got, expected))
        if field.name == "block_tables":  # nobody reads entries beyond a sequence's blocks
            counts = -(-expected.seq_lens // 16)
            is_read = torch.arange(theirs.shape[1], device=device) < counts.unsqueeze(1)
            ours = ours[is_read]
            theirs = theirs[is_read]
        if isinstance(theirs, Tensor):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, field.name
        else:
            assert ours == theirs, field.name


def hostile_rows(count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of ordinary numbers, with outliers, of zeros, of very large, tiny and broken ones."""
    x = randn(count, size, seed=1)
    x[:, 0] *= 50
    for row, factor in enumerate((1e30, 0.0, 1e-28, 1.0, 1e-33, 1e-42)):
        x[row::7] *= factor
    x = x if dtype == torch.float32 else x.clamp(-6e4, 6e4)
    if count > 9:
        x[7, -1] = torch.inf
        x[8, size // 2] = -torch.inf
        x[9, 0] = torch.nan
    return x.to(dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
