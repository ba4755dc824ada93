"""Turns a plan into tensors, runs the model, samples."""

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import BACKENDS, AttentionMetadata, KVCache
from nanovllm.config import ResolvedConfig
from nanovllm.engine.hooks import StepEdits
from nanovllm.engine.plan import NUM_PER_SEQ, StepPlan
from nanovllm.kernels.launch import compiled
from nanovllm.kernels.sample import SamplingValues
from nanovllm.kernels.step_inputs import PlannedRows, StepInputs
from nanovllm.layers.parallel import Parallel
from nanovllm.models.causal_lm import make_model
from nanovllm.models.config import load_model_config
from nanovllm.models.loader import load_weights
from nanovllm.models.shape import Shape
from nanovllm.runner.cuda_graphs import CudaGraphs, smallest_that_holds
from nanovllm.runner.device_tables import DeviceTables
from nanovllm.runner.kv_memory import GpuMemory, check_free_memory, count_blocks, memory_of_others
from nanovllm.runner.logprobs import Logprobs, of_sampled, of_targets
from nanovllm.runner.staging import Staging, to_device
from nanovllm.runner.step_handle import StepHandle, Stopwatch
from nanovllm.utils.machine import FEW_TOKENS, SMALL_MODEL, default_dtype, one_thread
from nanovllm.utils.spin import is_spinning_bounded

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

EDIT_BYTES, COUNT_BYTES = 5, 4
"""Where logits are edited, for each token: of a row of logits, its logit in float32 and its place in a mask; of a
sequence, its count."""

GRAPH_NODES_BYTES = 4 << 20
"""Allowance for one captured graph's own nodes: a few hundred kernels' parameters."""


class ModelRunner:
    """One rank: the model, its KV cache, and the device's tables. Steps run in the order of their launch."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        folder: Path | None,
        parallel: Parallel,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            config: resolved.
            folder: of the checkpoint; None for random weights.
            check: called for each tensor that is loaded; raises if there is no use in going on.

        Raises:
            ValueError: a bad checkpoint.
        """
        # The first attribute, so that a runner which is forgotten lets go of its graphs before the group they use.
        self.graphs: CudaGraphs | None = None
        self.config, self.parallel = config, parallel
        self.device, self.dtype = torch.device(config.device), getattr(torch, config.dtype)
        self._shape = Shape.of(hf_config).of_rank(parallel.size)
        self.backend = BACKENDS[config.attention_backend]()
        num_bytes = self._shape.num_parameters * self.dtype.itemsize
        check_free_memory(num_bytes, self.device, "the weights", "choose a smaller model, or a smaller dtype")
        with torch.device(self.device), default_dtype(self.dtype):
            self.model = make_model(hf_config, self.backend, parallel, config.max_model_len)
        self.backend.prepare_weights(self.model.parameters())
        if folder is None:
            from nanovllm.models.dummy_weights import fill_randomly

            fill_randomly(self.model, config.seed + parallel.rank, hf_config.initializer_range, check)
        else:
            load_weights(self.model, folder, parallel.rank == 0, check)
        self.backend.pack_weights(self.model.modules(), check)
        self.tables = DeviceTables(config.max_num_seqs, config.max_blocks_per_seq, self.device)
        self._staging = Staging(StepPlan.max_packed_size(config), self.device)
        self.caches: list[KVCache] = []
        self.draft: ModelRunner | None = None
        """The draft model's, where there is one: its cache has blocks of the same numbers."""
        if config.draft is not None:
            draft = load_model_config(config.draft["hf_config"], config.draft["config"]["model"])
            folder = None if config.draft["folder"] is None else Path(config.draft["folder"])
            of_draft = ResolvedConfig(**config.draft["config"] | {"device": config.device})
            self.draft = ModelRunner(of_draft, draft, folder, parallel, check)
        is_small = self.device.type == "cpu" and self._shape.num_parameters <= SMALL_MODEL
        self._has_small_model = is_small and not is_spinning_bounded()

    # ---- the KV cache

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers, on this rank; the draft model's, too."""
        own = self._shape.kv_bytes(self.dtype.itemsize) * self.config.block_size
        return own + (self.draft.block_bytes if self.draft is not None else 0)

    def make_cache(self) -> int:
        """Make the cache, of as many blocks as every rank has room for, and capture the graphs that read it.

        All ranks call it, once. Returns the number of blocks.

        Raises:
            ValueError: not enough for one sequence of max_model_len.
        """
        config = self.config
        with self._on_device():
            self._compile_kernels()
            device, ranks = self.device, self.parallel.ranks_per_device
            num_blocks = self.parallel.minimum(count_blocks(config, self.block_bytes, device, ranks, self._profile))
            self.caches = self._make_caches(num_blocks)
            if self.draft is not None:
                self.draft.caches = self.draft._make_caches(num_blocks)
            num_gib, num_tokens = num_blocks * self.block_bytes / 2**30, num_blocks * config.block_size
            room = f"{num_tokens} tokens, {num_tokens / config.max_model_len:.1f} sequences of {config.max_model_len}"
            logger.info("KV cache %.2f GiB: %d blocks of %d tokens, %s", num_gib, num_blocks, config.block_size, room)
            if config.use_graphs:
                self.graphs = self._new_graphs()
                with torch.inference_mode():
                    self.graphs.capture(self._decode, self._sample, show_progress=self.parallel.rank == 0)
        return num_blocks

    def _on_device(self) -> AbstractContextManager[object]:
        """Make this runner's GPU the current one, for whatever launches kernels or records events."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def _compile_kernels(self) -> None:
        """Compile what steps will launch, several kernels at a time: steps without values, on fake tensors, tell what.

        Several ranks compile as they go: their collectives know no fake tensors; nor does flash-attn.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        config = self.config
        if self.device.type != "cuda" or self.backend.name != "triton" or self.parallel.size > 1:
            return
        graphs = self._new_graphs()
        mixed = StepPlan.largest(2, 3, config.max_model_len)  # a decode and a prompt of two tokens
        mixed = replace(mixed, num_scored=np.zeros_like(mixed.num_scored), targets=mixed.targets[:0])
        # A few kernels know the next power of two of the batch size, 256 or more.
        sizes = {1, config.max_num_seqs, *(2**i for i in range(9, config.max_num_seqs.bit_length()))}
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with compiled(show_progress=True), fake, self.model.abridged() as num_layers:
            self.caches = self._make_caches(1)[:num_layers]
            self._run(mixed, self._staging.buffer[: mixed.head_size])  # first: it has the kernels that take longest
            for size in sizes:
                self._sample(*self._decode(graphs.inputs(size)))
        self.caches = []

    def _new_graphs(self) -> CudaGraphs:
        return CudaGraphs(self._staging.buffer, self.config.max_num_seqs, self.tables.padding_row)

    def _profile(self) -> GpuMemory:
        """Measure what the largest step and the graphs take, with a cache of a single block that everything shares."""
        config, device = self.config, self.device
        gc.collect()  # an engine that was dropped without close() may still hold its cache
        torch.cuda.empty_cache()
        total, weights = torch.cuda.mem_get_info(device)[1], torch.cuda.memory_allocated(device)
        self.caches = self._make_caches(1)
        torch.cuda.reset_peak_memory_stats(device)
        plan = StepPlan.largest(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.num_speculative_tokens
        )
        # Padding rows store nothing and read block 0: the shapes are real, the values are not.
        plan.rows[:] = self.tables.padding_row
        self.launch(plan).result()
        activations = torch.cuda.max_memory_allocated(device) - weights
        if self.parallel.rank == 0:
            num_edited = min(config.max_num_seqs * (1 + config.num_speculative_tokens), config.max_num_batched_tokens)
            edits = EDIT_BYTES * num_edited + COUNT_BYTES * config.max_num_seqs
            activations += edits * self._shape.vocab * self.parallel.size
        graphs = 0
        if config.use_graphs:
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info(device)[0]
            trial = self._new_graphs()
            trial.capture(self._decode, self._sample, trial.sizes[-2:])
            per_graph = (before - torch.cuda.mem_get_info(device)[0]) // len(trial.sizes[-2:])
            # The largest pays for the pool that all share; each of the others adds its own nodes.
            graphs = 2 * per_graph + len(trial.sizes) * GRAPH_NODES_BYTES
            trial.release()
        self.caches = []
        torch.cuda.empty_cache()
        self.parallel.minimum(0)  # ranks on the same GPU have given back their activations, too
        return GpuMemory(total, memory_of_others(device), weights, activations, graphs)

    def _make_caches(self, num_blocks: int) -> list[KVCache]:
        shape = (num_blocks, self.config.block_size, self._shape.kv_heads, self._shape.head_dim)
        return [self.backend.allocate_cache(shape, self.dtype, self.device) for _ in range(self._shape.layers)]

    # ---- a step

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> StepHandle:
        """Start a step; the handle waits for it. The host's values decide sizes only, so nothing here waits."""
        if plan.for_draft_model and self.draft is not None:
            return self.draft.launch(plan)
        is_small = self._has_small_model and plan.num_tokens <= FEW_TOKENS
        with self._on_device(), torch.inference_mode(), one_thread() if is_small else nullcontext():
            return self._launch(plan, edits)

    def _launch(self, plan: StepPlan, edits: StepEdits | None) -> StepHandle:
        stopwatch = Stopwatch(self.device)
        graphs = self.graphs if plan.num_decodes == plan.num_seqs and not len(plan.targets) else None
        if graphs is not None:
            plan = plan.pad(smallest_that_holds(graphs.sizes, plan.num_seqs), self.tables.padding_row)
        packed = self._staging.send(plan.arrays())
        stopwatch.start()
        self.tables.update(plan, packed[plan.head_size :])
        token_ids = logprobs = scores = None
        if graphs is not None:
            decoded = graphs.replay(plan.num_seqs)
            # Every rank knows, so that all of them leave the captured collectives for others.
            if self.tables.sampling_cpu["is_edited"][plan.rows].any():
                sampled: tuple[Tensor, Tensor] | None = self._sample(*decoded, edits)
            else:
                sampled = graphs.replay_sampler(plan.num_seqs)
        else:
            sampled, scores = self._run(plan, packed, edits)
        if sampled is not None:
            token_ids, hidden = sampled
            logprobs = of_sampled(plan, self.tables, token_ids, hidden, self.model.compute_logits)
        if self.parallel.rank > 0:  # nobody reads a follower's results
            token_ids = logprobs = scores = None
        return StepHandle(plan, token_ids, logprobs, scores, stopwatch)

    def _run(
        self, plan: StepPlan, packed: Tensor, edits: StepEdits | None = None
    ) -> tuple[tuple[Tensor, Tensor] | None, Logprobs | None]:
        """Any step, eagerly: what is sampled (see _sample; None if nothing), and what is scored."""
        sizes = [NUM_PER_SEQ * plan.num_seqs, plan.num_tokens, len(plan.targets)]
        per_seq, token_ids, targets = torch.split(packed[: plan.head_size], sizes)
        rows, num_computed, num_scheduled, *_ = per_seq.view(NUM_PER_SEQ, plan.num_seqs).unbind(0)
        inputs, hidden = self._forward(PlannedRows(rows, num_computed, num_scheduled, token_ids), plan)
        scores = of_targets(plan, self.tables, targets, hidden, self.model.compute_logits)
        if not plan.num_sampled.any():
            return None, scores
        # Always sample once per sequence, to keep shapes simple. Samples nobody asked for are dropped: those of a
        # prompt's chunk, and of a prompt that is only scored. A row whose drafts were verified leaves several samples
        # in last_token, of which none is read, because the host sends the token after drafts.
        last, values = inputs.cu_seqlens[1:] - 1, inputs.sampling
        num_drawn = 1 + plan.num_drafts
        if num_drawn.sum() > plan.num_seqs:
            drawn_of = np.repeat(np.arange(plan.num_seqs), num_drawn)
            places = np.repeat(num_drawn.cumsum(), num_drawn) - 1 - np.arange(len(drawn_of))
            of_seq, before_last = to_device(np.stack((drawn_of, places)), self.device).unbind(0)
            rows, last, values = rows[of_seq], last[of_seq] - before_last, values.of_rows(of_seq)
            values = values._replace(positions=values.positions - before_last.int())
        return self._sample(hidden[last], rows, values, edits), scores

    def _decode(self, head: Tensor) -> tuple[Tensor, Tensor, SamplingValues]:
        """A step of decodes alone, from tensors alone, so that a CUDA graph can capture it; gives what _sample takes.

        head is int32 [NUM_PER_SEQ + 1, n]: a plan's first arrays, up to token_ids, which then have the same length.
        """
        rows, num_computed, num_scheduled, *_, token_ids = head.unbind(0)
        inputs, hidden = self._forward(PlannedRows(rows, num_computed, num_scheduled, token_ids), None)
        return hidden, rows, inputs.sampling

    def _forward(self, planned: PlannedRows, plan: StepPlan | None) -> tuple[StepInputs, Tensor]:
        """The hidden states of all tokens, and what they were made from.

        Args:
            plan: for what the host needs to know; None where there are decodes alone.
        """
        inputs = self.backend.step_inputs(planned, self.tables.of_rows, self.config.block_size)
        metadata = AttentionMetadata(
            num_decodes=len(planned.rows) if plan is None else plan.num_decodes,
            cu_seqlens_q=inputs.cu_seqlens,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slots,
            query_lens_cpu=None if plan is None else plan.num_scheduled,
            seq_lens_cpu=None if plan is None else plan.num_computed + plan.num_scheduled,
        )
        metadata = self.backend.prepare_attention(metadata, self.caches[0], self._shape.heads)
        return inputs, self.model(inputs.token_ids, inputs.positions, self.caches, metadata)

    def _sample(
        self, hidden: Tensor, rows: Tensor, values: SamplingValues, edits: StepEdits | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample one token for each of rows from hidden [n, hidden], and leave it for the row's next decode.

        Rank 0 samples, from everybody's logits, and tells the others.

        Returns token ids int32 [n], -1 for a row whose logits are broken, and hidden.
        """
        logits = self.model.compute_logits(hidden)
        if logits is None:
            token_ids = checked = torch.empty_like(rows)
        elif edits is None:
            token_ids, checked = self.backend.sample(logits, values)
        else:
            token_ids, checked = edits.sample(self.backend, logits, values)
        self.tables.of_rows.last_token[rows] = self.parallel.broadcast(token_ids)
        return checked, hidden

    def reason_to_close(self) -> str | None:
        """Why nothing can run after a step has failed: some CUDA errors make every later call fail, too."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return "after this CUDA error nothing on the device can be trusted"
        return None

    def close(self) -> None:
        """Let go of the device's memory, for good; graphs first, which point into the rest."""
        if self.draft is not None:
            self.draft.close()
        with suppress(RuntimeError), self._on_device():  # after a CUDA error every call fails; let go all the same
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        with suppress(RuntimeError):
            if self.graphs is not None:
                self.graphs.release()
        self.graphs, self.caches = None, []
        del self.model, self.backend
        with suppress(RuntimeError):
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
