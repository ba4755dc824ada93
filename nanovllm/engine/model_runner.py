"""Turns a plan into tensors, runs the model, samples."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import AttentionMetadata, KVCache, make_backend
from nanovllm.config import EngineConfig
from nanovllm.engine.plan import HEADER, ROW_SAMPLING, IntArray, StepPlan
from nanovllm.layers.parallel import Parallel
from nanovllm.models.qwen3 import kv_heads_of
from nanovllm.models.registry import ARCHITECTURES, model_class
from nanovllm.utils.loader import fill_randomly, load_weights
from nanovllm.utils.machine import free_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

CPU_CACHE_LIMIT = 4 << 30


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, for the plan's sampling sequences in the plan's order.

    Attributes:
        token_ids: int32 [num_sampled].
        logprobs: for each of them {token id: log-probability} or None; None if nobody asked.
    """

    token_ids: IntArray
    logprobs: Seq[dict[int, float] | None] | None


class StepHandle:
    """A launched step; `result()` waits for it."""

    def __init__(self, plan: StepPlan, token_ids: Tensor | None, logprobs: "Logprobs | None") -> None:
        self._sampled = np.flatnonzero(plan.samples)
        self._token_ids, self._logprobs = token_ids, logprobs
        self._ready: torch.cuda.Event | None = None
        if token_ids is not None and token_ids.is_cuda:
            self._token_ids = token_ids.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def result(self) -> StepResult:
        """Wait for the device, and read what it sampled."""
        if self._token_ids is None:
            return StepResult(np.empty(0, np.int32), None)
        if self._ready is not None:
            self._ready.synchronize()
        token_ids = self._token_ids.numpy()[self._sampled]
        logprobs = self._logprobs.read(token_ids, self._sampled) if self._logprobs is not None else None
        return StepResult(token_ids, logprobs)


class Logprobs:
    """Log-probabilities of a step's raw distributions: of the sampled token and of the k most likely, by sequence."""

    def __init__(self, logits: Tensor, token_ids: Tensor, counts: IntArray) -> None:
        logprobs = logits.float().log_softmax(-1)
        self._counts = counts
        self._sampled = logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
        self._top = logprobs.topk(min(int(counts.max()), logits.shape[1]), dim=1)

    def read(self, token_ids: IntArray, sampled: np.ndarray) -> list[dict[int, float] | None]:
        of_sampled, top_ids, top = self._sampled.tolist(), self._top.indices.tolist(), self._top.values.tolist()
        read: list[dict[int, float] | None] = []
        for token_id, i in zip(token_ids.tolist(), sampled.tolist(), strict=True):
            count = int(self._counts[i])
            likely = dict(zip(top_ids[i][:count], top[i][:count], strict=True))
            read.append(None if count < 0 else {token_id: of_sampled[i], **likely})
        return read


class ModelRunner:
    """One rank: the model, its KV cache, and the device's tables of resident sequences, by row."""

    def __init__(
        self, config: EngineConfig, hf_config: "PretrainedConfig", folder: Path | None, parallel: Parallel
    ) -> None:
        """
        Args:
            config: resolved.
            folder: of the checkpoint; None for random weights.

        Raises:
            ValueError: a bad checkpoint, or a KV cache that cannot hold one sequence of max_model_len.
        """
        self.config, self.parallel = config, parallel
        self.device, self.dtype = torch.device(config.device), getattr(torch, config.dtype)
        self.vocab_size = hf_config.vocab_size
        group = hf_config.num_attention_heads // hf_config.num_key_value_heads
        self.backend = make_backend(config.attention_backend, self.device, hf_config.head_dim, group, config.block_size)
        with torch.device(self.device), _default_dtype(self.dtype):
            architecture = next(name for name in hf_config.architectures if name in ARCHITECTURES)
            self.model = model_class(architecture)(hf_config, self.backend, parallel, config.max_model_len)
        self.model.eval()
        if folder is None:
            fill_randomly(self.model, config.seed + parallel.rank, hf_config.initializer_range)
        else:
            load_weights(self.model, folder, show_progress=parallel.rank == 0)
        self._num_kv_heads = kv_heads_of(hf_config, parallel)[1]
        self._head_dim, self._num_layers = hf_config.head_dim, hf_config.num_hidden_layers
        self.caches: list[KVCache] = []
        self._make_tables()

    def _make_tables(self) -> None:
        """The device's tables: what the runner knows of each resident sequence, told by plans."""
        rows, device = self.config.max_num_seqs, self.device
        self._block_tables = torch.zeros(rows, self.config.max_blocks_per_seq, dtype=torch.int32, device=device)
        self._last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self._temperature = torch.zeros(rows, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self._top_p, self._min_p = torch.ones(rows, device=device), torch.zeros(rows, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._num_logprobs_cpu = np.full(rows, -1, np.int32)

    # ---- the KV cache

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        per_token: int = 2 * self._num_layers * self._num_kv_heads * self._head_dim * self.dtype.itemsize
        return per_token * self.config.block_size

    def count_blocks(self) -> int:
        """How many blocks the configuration allows; an explicit count wins, then explicit bytes."""
        if self.config.num_kvcache_blocks is not None:
            return self.config.num_kvcache_blocks
        budget = self.config.kvcache_memory_bytes
        if budget is None:
            budget = self._free_gpu_memory() if self.device.type == "cuda" else min(free_memory() // 4, CPU_CACHE_LIMIT)
        return budget // self.block_bytes

    def _free_gpu_memory(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free - (1 - self.config.gpu_memory_utilization) * total)

    def allocate_cache(self, num_blocks: int) -> None:
        """Make the cache. Raises a ValueError, with the length that would fit, if one sequence does not."""
        config = self.config
        if num_blocks < config.max_blocks_per_seq:
            fits = max(num_blocks, 0) * config.block_size
            raise ValueError(
                f"the KV cache has {max(num_blocks, 0)} blocks of {config.block_size} tokens, and one sequence of "
                f"max_model_len={config.max_model_len} needs {config.max_blocks_per_seq}: set max_model_len to at most "
                f"{fits}, or give it more memory (kvcache_memory_bytes, num_kvcache_blocks, gpu_memory_utilization)"
            )
        shape = (num_blocks, config.block_size, self._num_kv_heads, self._head_dim)
        self.caches = [self.backend.allocate_cache(*shape, self.dtype, self.device) for _ in range(self._num_layers)]
        tokens = num_blocks * config.block_size
        logger.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB: %d tokens, %.1f sequences of %d",
            num_blocks,
            config.block_size,
            num_blocks * self.block_bytes / 2**30,
            tokens,
            tokens / config.max_model_len,
            config.max_model_len,
        )

    # ---- a step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step; the handle waits for it. Steps run in the order of their launch."""
        packed = torch.from_numpy(plan.pack()).to(self.device)
        return self._run(plan, packed)

    def _run(self, plan: StepPlan, packed: Tensor) -> StepHandle:
        """Run a step whose packed plan is on the device. Host values decide sizes only: nothing waits."""
        num_seqs, num_tokens = plan.num_seqs, plan.num_tokens
        per_seq = packed[HEADER : HEADER + 4 * num_seqs].view(4, num_seqs)
        rows, num_computed, num_scheduled, _ = per_seq.unbind(0)
        rest = packed[HEADER + 4 * num_seqs :]
        self._update_tables(plan, rest[num_tokens:])

        cu_seqlens = torch.nn.functional.pad(num_scheduled.cumsum(0, dtype=torch.int32), (1, 0))
        indices = torch.arange(num_seqs, dtype=torch.int32, device=self.device)
        of_token = indices.repeat_interleave(num_scheduled, output_size=num_tokens)
        token_ids = torch.where(rest[:num_tokens] < 0, self._last_token[rows[of_token]], rest[:num_tokens])
        within = torch.arange(num_tokens, dtype=torch.int32, device=self.device) - cu_seqlens[of_token]
        positions = within + num_computed[of_token]
        block_tables = self._block_tables[rows]
        size = self.config.block_size
        blocks = block_tables[of_token, positions // size].long()
        metadata = AttentionMetadata(
            num_decodes=plan.num_decodes,
            cu_seqlens_q=cu_seqlens,
            seq_lens=num_computed + num_scheduled,
            block_tables=block_tables,
            slot_mapping=blocks * size + positions % size,
            query_lens_cpu=plan.num_scheduled,
            seq_lens_cpu=plan.num_computed + plan.num_scheduled,
        )
        hidden = self.model(token_ids, positions, self.caches, metadata)
        if not plan.samples.any():
            return StepHandle(plan, None, None)
        # Every sequence's last token is sampled from. Where the plan asks for no sample (the chunk of a prompt, at
        # most one a step), the result is dropped, and what it leaves in _last_token is overwritten before it is read.
        logits = self.model.compute_logits(hidden[cu_seqlens[1:] - 1])
        return self._sample(plan, logits, rows, metadata.seq_lens)

    def _sample(self, plan: StepPlan, logits: Tensor | None, rows: Tensor, positions: Tensor) -> StepHandle:
        assert logits is not None
        token_ids = self.backend.sample(
            logits,
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            self._seeds[rows],
            positions,
        )
        self._last_token[rows] = token_ids
        counts = self._num_logprobs_cpu[plan.rows]
        wanted = (counts >= 0) & (plan.samples > 0)
        return StepHandle(plan, token_ids, Logprobs(logits, token_ids, counts) if wanted.any() else None)

    def _update_tables(self, plan: StepPlan, packed: Tensor) -> None:
        """Apply what the plan says of new blocks and new rows; packed holds both, one after the other."""
        num_entries, num_rows = len(plan.block_entries), len(plan.new_rows)
        if num_entries:
            row, index, block = packed[: 3 * num_entries].view(num_entries, 3).unbind(1)
            self._block_tables[row, index] = block
        if num_rows:
            fields = packed[3 * num_entries :].view(num_rows, ROW_SAMPLING.itemsize // 4).unbind(1)
            row, temperature, top_k, top_p, min_p, seed_low, seed_high, _ = fields
            self._temperature[row] = temperature.view(torch.float32)
            self._top_k[row] = top_k
            self._top_p[row] = top_p.view(torch.float32)
            self._min_p[row] = min_p.view(torch.float32)
            self._seeds[row] = (seed_low.long() & 0xFFFFFFFF) | (seed_high.long() << 32)
            self._num_logprobs_cpu[plan.new_rows["row"]] = plan.new_rows["num_logprobs"]

    def close(self) -> None:
        """Let go of the device's memory."""
        self.caches = []
        del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _default_dtype:
    """Make new tensors of a dtype, and put back what was the default."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)
