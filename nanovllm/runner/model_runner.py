"""Runs plans on the device of one rank: sends a plan there, computes the model, samples."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.backends import BACKENDS, KVCache, LayerCache
from nanovllm.backends.cpu.recorded_steps import RecordedSteps
from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.config import ResolvedConfig
from nanovllm.engine.interfaces import StepEdits
from nanovllm.engine.plan import NUM_PER_SEQ, IntArray, StepPlan
from nanovllm.layers.parallel import Parallel
from nanovllm.models.decoder import Decoder
from nanovllm.models.loader import Quantizer
from nanovllm.ops.step_inputs import DevicePlan, StepInputs
from nanovllm.runner.device import DeviceRows, Staging
from nanovllm.runner.kv_memory import check_free_memory
from nanovllm.runner.logprobs import embed_targets, find_targets, score_targets, start_logprobs
from nanovllm.runner.sampler import Sampler, choose_samples
from nanovllm.runner.step_handle import DeviceResult, Front, StepHandle, Stopwatch
from nanovllm.utils.machine import FEW_TOKENS, SMALL_MODEL, default_dtype, torch_in_one_thread
from nanovllm.utils.spin import Neighbours

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Graphs = CudaGraphs | RecordedSteps
"""These repeat decode steps, on a GPU and on a CPU."""


class ModelRunner:
    """One rank: the model, its KV cache, and the device's tables. Steps run in the order of their launch."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        read_weights: Callable[[Decoder], None],
        parallel: Parallel,
        quantizer: Quantizer | None = None,
        decoder: type[Decoder] = Decoder,
    ) -> None:
        """Load the model. ValueError for a bad checkpoint or too little memory.

        Args:
            read_weights: fills the model's parameters.
            quantizer: gives it quantised matrices; None for a model without them.
            decoder: the class of the model.
        """
        # It is the first attribute, because Python deletes attributes in order. If a runner is deleted without close(),
        # its graphs must go before the process group (in `parallel`) that they use.
        self.graphs: Graphs | None = None
        self.caches: list[LayerCache] = []  # startup.py fills it, and `graphs`, after the model is loaded
        self.draft: ModelRunner | None = None  # runs the draft model; load.py sets it if there is one
        self.config = config
        self.parallel = parallel
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.hf_config = hf_config
        self.shape = decoder.shape_class.from_config(hf_config, parallel.stage).shard(parallel.size)
        self.backend = BACKENDS[config.attention_backend]()
        self.quantizer = quantizer
        self.decoder = decoder
        self._read_weights = read_weights
        self.load_model()
        self.device_rows = DeviceRows(config.max_num_seqs, config.max_blocks_per_seq, self.device)
        self.staging = Staging(StepPlan.max_size(config), self.device)
        self.sampler = Sampler(self.backend, self.device_rows, parallel)
        self._is_small = self.device.type == "cpu" and self.shape.num_parameters <= SMALL_MODEL
        self._neighbours = Neighbours()

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> StepHandle:
        """Start a step. The handle's `result` waits for it. The plan has all sizes, so nothing is read from the device
        here."""
        if plan.for_draft_model and self.draft is not None:
            return self.draft.launch(plan)
        with self.computing(plan.num_tokens):
            stopwatch = Stopwatch(self.device)
            graphs = self.choose_graphs(plan)
            if graphs is not None:
                plan = graphs.pad(plan)
            packed = self.staging.send(plan.arrays())
            stopwatch.start()
            self.device_rows.update(plan, packed[plan.head_size :])
            if graphs is None:
                result = self.finish(self.start(plan, packed), edits)
            else:
                is_edited = bool(self.device_rows.sampling_cpu["is_edited"][plan.rows].any())
                result = self.finish_replay(graphs, self.replay(graphs, plan), edits, is_edited)
            if self.parallel.rank > 0:
                result = DeviceResult()  # nobody reads the results of other ranks
            return StepHandle(plan, result, stopwatch)

    def compute(self, plan: StepPlan, packed: Tensor, edits: StepEdits | None = None) -> DeviceResult:
        """Run any step eagerly, operator by operator. packed is int32, the plan's arrays on the device."""
        return self.finish(self.start(plan, packed), edits)

    def start(self, plan: StepPlan, packed: Tensor, x: Tensor | None = None) -> Front:
        """Run the first half of a step: this rank's layers.

        Args:
            packed: int32, the plan's arrays on the device.
            x: [num_tokens, hidden], from the stage before; None without a pipeline, and in its first stage.
        """
        sizes = [NUM_PER_SEQ * plan.num_seqs, plan.num_tokens, len(plan.targets)]
        per_seq, token_ids, targets = torch.split(packed[: plan.head_size], sizes)
        rows, num_computed, num_scheduled, *_ = per_seq.view(NUM_PER_SEQ, plan.num_seqs).unbind(0)
        lens_cpu = (plan.num_scheduled, plan.num_computed + plan.num_scheduled)
        planned = DevicePlan(rows, num_computed, num_scheduled, token_ids, plan.num_decodes, *lens_cpu)
        inputs, hidden = self.forward(planned, x)
        positions = inputs.seq_lens
        last = None
        if plan.num_sampled.any():
            rows, last, positions = choose_samples(plan, rows, inputs)
        scored = find_targets(plan) if len(targets) else None
        return Front(plan, hidden, targets, scored, last, rows, positions, *self._read_counts(plan))

    def _read_counts(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Return how many log-probabilities each sequence asks for, of its output and of its prompt."""
        values = self.device_rows.sampling_cpu[plan.rows]
        return values["num_logprobs"], values["num_prompt_logprobs"]

    def finish(self, front: Front, edits: StepEdits | None = None) -> DeviceResult:
        """Run the second half of a step: logits, scores and samples. Of a pipeline's stages only the first has it."""
        if not self.model.stage.is_first:
            return DeviceResult()
        plan = front.plan
        hidden = front.hidden
        token_logprobs = self.backend.token_logprobs
        scores = embeddings = None
        if front.scored is not None:
            counts = front.num_prompt_logprobs
            scores = score_targets(plan, counts, front.targets, front.scored, hidden, self.model, token_logprobs)
            embeddings = embed_targets(plan, front.scored, hidden)
        if front.sampled is None:
            return DeviceResult(scores=scores, embeddings=embeddings)
        logits = self.model.compute_logits(hidden[front.sampled])
        sampled = self.sampler.sample(logits, front.rows, front.positions, edits, front.sampling)
        logprobs = start_logprobs(plan, front.num_logprobs, sampled, logits, token_logprobs)
        return DeviceResult(sampled, logprobs, scores, embeddings)

    def forward(self, planned: DevicePlan, x: Tensor | None = None) -> tuple[StepInputs, Tensor]:
        """Compute the hidden states of all tokens, [num_tokens, hidden]. Returns the step's inputs, too.

        `start` explains x. In a later stage of a pipeline None stands for zeros, so that it can prepare without the
        other stages.
        """
        if x is None and not self.model.stage.is_first:
            x = torch.zeros(len(planned.token_ids), self.shape.hidden, dtype=self.dtype, device=self.device)
        tables = (self.device_rows.block_tables, self.device_rows.last_token)
        inputs = self.backend.step_inputs(planned, *tables, self.config.block_size)
        if (cache := next((cache for cache in self.caches if isinstance(cache, KVCache)), None)) is not None:
            inputs = self.backend.prepare_attention(inputs, cache, self.shape.heads)
        return inputs, self.model(inputs, self.caches, x)

    # ---- steps that only decode: CUDA graphs, and recorded steps on a CPU

    def choose_graphs(self, plan: StepPlan) -> Graphs | None:
        """Return the graphs if they can run the plan. They can if it only decodes, and is not larger than the largest.

        A step that also scores prompt tokens runs eagerly, because their number varies.
        """
        graphs = self.graphs
        only_decodes = plan.num_decodes == plan.num_seqs and not len(plan.targets)
        if graphs is None or not only_decodes or plan.num_seqs > graphs.most_seqs:
            return None
        return graphs

    def replay(self, graphs: Graphs, plan: StepPlan) -> Front:
        """Do what `start` does, for a plan that `pad` of the graphs has returned.

        On a CPU the first step of each size runs here as Python, and is recorded.
        """
        size = plan.num_seqs
        hidden, rows, positions = graphs.run("model", size, partial(self.decode, graphs.inputs(size)))
        return Front(plan, hidden, rows[:0], None, None, rows, positions, *self._read_counts(plan))

    def finish_replay(self, graphs: Graphs, front: Front, edits: StepEdits | None, is_edited: bool) -> DeviceResult:
        """Do what `finish` does after `replay`.

        A step runs `finish` itself if logits are edited, or if log-probabilities are wanted, which need the logits:
        graphs do not keep them, because those of all sizes would take gigabytes.

        All ranks must choose the same branch. Sampling ends with a broadcast between the ranks. If one rank did it
        inside the graph and another outside, the broadcasts would not match, and both would wait for ever. So the
        branch depends on what every rank knows.

        Args:
            edits: of the logits; None on ranks other than 0.
            is_edited: whether a sequence has edits.
        """
        if is_edited or front.num_logprobs.max() >= 0:
            every_row = torch.arange(len(front.hidden), device=self.device)
            return self.finish(front._replace(sampled=every_row), edits)
        sample = partial(self.sample_decoded, front.hidden, front.rows, front.positions, front.sampling)
        return DeviceResult(graphs.run("sampler", front.plan.num_seqs, sample))

    def decode(self, head: Tensor, x: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a step that only decodes. All inputs are tensors on the device, so that a CUDA graph can record it.

        Args:
            head: int32 [NUM_PER_SEQ + 1, n], a plan's arrays up to token_ids: see `make_padding`.
            x: [n, hidden], from the stage before: see `start`.

        Returns:
            The arguments of `sample_decoded`: hidden states [n, hidden], rows int32 [n], and positions int32 [n].
        """
        rows, num_computed, num_scheduled, *_, token_ids = head.unbind(0)
        inputs, hidden = self.forward(DevicePlan(rows, num_computed, num_scheduled, token_ids, len(rows)), x)
        return hidden, rows, inputs.seq_lens

    def sample_decoded(self, hidden: Tensor, rows: Tensor, positions: Tensor, sampling: Tensor | None = None) -> Tensor:
        """Sample a token for each of the decodes, int32 [n]. This is a CUDA graph of its own, after `decode`.

        `Front` explains the arguments.
        """
        return self.sampler.sample(self.model.compute_logits(hidden), rows, positions, kept=sampling)

    # ---- the device

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """Within, this thread computes a step of so many tokens: on the GPU, or with as many CPU threads as pay off."""
        with self.on_device(), torch.inference_mode(), self._choose_threads(num_tokens):
            yield

    def _choose_threads(self, num_tokens: int) -> AbstractContextManager[object]:
        """Choose the threads that compute a step on a CPU. The CPU kernels have a team of their own."""
        if self.backend.name == "cpu":
            return torch_in_one_thread()
        is_busy = self._neighbours.are_busy()
        gains_nothing = self._is_small and (num_tokens <= FEW_TOKENS or is_busy)
        return torch_in_one_thread() if gains_nothing and "OMP_NUM_THREADS" not in os.environ else nullcontext()

    def on_device(self) -> AbstractContextManager[object]:
        """Make this runner's GPU the current one. Kernels and events go to the current GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def reason_to_close(self) -> str | None:
        """Return why no further step can run after a failed one; None if it can. Some CUDA errors make every later call
        fail."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return "after this CUDA error nothing on the device can be trusted"
        return None

    def load_model(self) -> None:
        """Make the model and read its weights: when the runner is made, and after `free_model`."""
        quantizer = self.quantizer
        itemsize = self.dtype.itemsize
        if quantizer is None:
            num_bytes = self.shape.count_bytes(itemsize)
            advice = 'choose a smaller model, a smaller dtype, or quantization="int8"'
        else:
            num_bytes = quantizer.count_bytes(self.shape, itemsize)
            advice = "choose a smaller model"
        check_free_memory(num_bytes, self.device, "the weights", advice)
        with torch.device(self.device if quantizer is None else "meta"), default_dtype(self.dtype):
            self.model = self.decoder(self.hf_config, self.backend, self.parallel, self.config.max_model_len)
        if quantizer is not None:
            quantizer.allocate(self.model)
        self.backend.prepare_weights(parameter for parameter in self.model.parameters() if not parameter.is_meta)
        self._read_weights(self.model)
        self.backend.pack_weights(self.model.modules())

    def free_model(self) -> None:
        """Free the weights. Nothing may be launched before `load_model` has run."""
        del self.model

    def close(self) -> None:
        """Free the device's memory for good. Graphs go first, because they use addresses in the other memory."""
        if self.draft is not None:
            self.draft.close()
        with suppress(RuntimeError), self.on_device():  # after a CUDA error every call fails; free the rest anyway
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        with suppress(RuntimeError):
            if self.graphs is not None:
                self.graphs.release()
        self.graphs = None
        self.caches = []
        if hasattr(self, "model"):
            self.free_model()
        del self.backend, self.sampler
        with suppress(RuntimeError):
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
