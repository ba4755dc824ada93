"""Runs plans on the device of one rank: sends a plan there, computes the model, samples."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.backends import CacheSize, KVCache, LayerCache, make_backend
from nanovllm.backends.steps import EAGER, Steps, Stopwatch
from nanovllm.config import ResolvedConfig
from nanovllm.engine.plan import NO_LOGPROBS, StepPlan, find_lengths
from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import Quantizer
from nanovllm.models.sizes import Sizes
from nanovllm.models.weight_reader import allocate
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.runner.device_rows import DeviceRows
from nanovllm.runner.head_inputs import HeadInputs
from nanovllm.runner.kv_memory import bound_length
from nanovllm.runner.logprobs import start_logprobs
from nanovllm.runner.sampler import Sampler, StepEdits, choose_samples
from nanovllm.runner.step_handle import StepHandle
from nanovllm.utils.machine import default_dtype
from nanovllm.utils.memory import check_free_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig


LaunchedLayers = tuple[HeadInputs, Steps, Stopwatch]
"""A step whose layers are launched. `ModelRunner.launch_head` takes it."""


class ModelRunner:
    """One rank: the model, its KV cache, and the device's tables. Steps run in the order of their launch.

    A rank is a process that computes the model or a share of it. With several ranks, rank 0 plans the steps and sends
    each plan to the other ranks through shared memory, and every rank calls `launch` with it (distributed/leader.py).
    If a rank dies, a call of rank 0 raises a RuntimeError within seconds, and `reason_to_close` says that the engine
    cannot go on. `backend` has all that differs from device to device. `device_rows` are the device's tables: a row has
    a sequence's blocks, its last token and its sampling values.

    Attributes:
        has_head: whether this rank takes part in computing logits.
    """

    has_head = True

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
            quantizer: gives the model quantised matrices; None for a model without quantised matrices.
            decoder: the class of the model.
        """
        # `steps` is the first attribute, because Python deletes attributes in order. If a runner is deleted without
        # close(), its graphs must go before the process group (in `parallel`) that they use.
        self.steps: Steps = EAGER
        self.caches: list[LayerCache] = []  # `fill_cache` fills it after the model is loaded
        self.draft: ModelRunner | None = None  # runs the draft model; load.py sets it if there is one
        self.config = config
        self.parallel = parallel
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, config.kv_dtype)
        self.hf_config = hf_config
        self.backend = make_backend(config.attention_backend, self.device)
        self.sizes = Sizes(hf_config, parallel.size, decoder)
        # A layer may pad its heads, and so its cache, to a length that the backend has kernels for. `sizes` counts with
        # a plain Backend, which must have the same lengths.
        self.sizes.backend.head_dims = self.backend.head_dims  # type: ignore[misc]  # of this backend alone
        self.config = config = bound_length(self)  # lowers a max_model_len for which no cache can have room
        self.quantizer = quantizer
        self.decoder = decoder
        self._read_weights = read_weights
        self.load_model()
        self.backend.choose_threads(self.sizes.num_parameters)
        self.device_rows = DeviceRows(config.max_num_seqs, config.max_blocks_per_seq, self.device)
        self.staging = self.backend.make_staging(StepPlan.max_size(config))
        self.sampler = Sampler(self.backend, self.device_rows, parallel)

    # ---- a step

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> StepHandle:
        """Start a step. The handle's `result` waits for it.

        The sizes of all tensors follow from the plan. So the host knows them without waiting for the device.
        """
        with self.computing():
            plan, steps, stopwatch = self._begin(plan)
            return self._end(self.run_layers(plan, steps), steps, stopwatch, edits)

    def launch_layers(self, plan: StepPlan) -> LaunchedLayers:
        """Start the first part of a step. `launch_head` starts the rest."""
        with self.computing():
            plan, steps, stopwatch = self._begin(plan)
            return self.run_layers(plan, steps), steps, stopwatch

    def launch_head(self, layers: LaunchedLayers, edits: StepEdits | None = None) -> StepHandle:
        """Start the second part of a step. The handle's `result` waits for the step."""
        with self.computing():
            return self._end(*layers, edits)

    def _begin(self, plan: StepPlan) -> tuple[StepPlan, Steps, Stopwatch]:
        """Send a plan to the device. Return it with its padding, what runs the step, and what times it."""
        stopwatch = self.backend.make_stopwatch()
        steps = self.choose_steps(plan)
        plan = steps.pad(plan)
        self.send(plan)
        stopwatch.start()
        return plan, steps, stopwatch

    def _end(self, head: HeadInputs, steps: Steps, stopwatch: Stopwatch, edits: StepEdits | None) -> StepHandle:
        handle = self.run_head(head, edits, steps)
        if self.parallel.rank > 0:
            handle = StepHandle(head.plan)  # nobody reads the results of other ranks
        handle.start_reading(stopwatch, self.backend)
        return handle

    def choose_steps(self, plan: StepPlan) -> Steps:
        """Return the object that runs the plan.

        If every sequence of a step computes one token, and there are not too many, this is `self.steps`, which may
        replay a recording of the step (for example a CUDA graph). Any other step runs eagerly. A step that also scores
        prompt tokens runs eagerly, because their number varies.
        """
        can_replay = plan.num_decodes == plan.num_seqs and not len(plan.targets)
        return self.steps if can_replay and plan.num_seqs <= self.steps.most_seqs else EAGER

    def send(self, plan: StepPlan) -> None:
        """Copy a plan to the staging buffer on the device, and write what it changes into the tables."""
        sent = self.staging.send(plan.arrays())
        if len(plan.block_entries) or len(plan.new_rows):
            *_, entries, new_rows = torch.split(sent, plan.lengths)
            self.device_rows.add_blocks(entries)
            self.device_rows.move_in(new_rows, plan.new_rows)

    def run_layers(self, plan: StepPlan, steps: Steps) -> HeadInputs:
        """Run the first part of a step: the model's layers. The plan is in the staging buffer: see `send`."""
        if steps is EAGER:
            inputs, hidden = self.forward(plan)
        else:
            inputs, hidden = steps.replay("layers", plan.num_seqs)
        target_indices = None
        if len(plan.targets):
            from nanovllm.runner.targets import find_targets

            target_indices = find_targets(plan)
        rows, sample_indices, positions = choose_samples(plan, inputs, self.backend)
        return HeadInputs(plan, hidden, target_indices, sample_indices, rows, positions)

    def run_head(self, head: HeadInputs, edits: StepEdits | None = None, steps: Steps = EAGER) -> StepHandle:
        """Run the second part of a step: logits, scores and samples. Return the handle of what was computed.

        If logits are edited, or log-probabilities wanted, the step samples eagerly, because both need the logits. A
        recording keeps no logits: on a GPU the logits of all recorded sizes would take gigabytes.

        All ranks must choose the same way. Sampling ends with a broadcast between the ranks. If one rank sampled inside
        a CUDA graph and another rank outside, the broadcasts would not match, and both ranks would wait for ever. So
        the choice depends on what every rank knows.

        Args:
            edits: edits of the logits; None on ranks other than 0.
        """
        plan = head.plan
        asked = self.device_rows.sampling_cpu[plan.rows]  # what each sequence asks for: see ROW_SAMPLING
        targets = None
        if len(plan.targets):
            from nanovllm.runner.targets import Targets

            targets = Targets(head, asked["num_prompt_logprobs"], self.model, self.backend)
        if not plan.num_sampled.any():
            return StepHandle(plan, targets=targets)
        num_logprobs = asked["num_logprobs"]
        needs_logits = asked["is_edited"].any() or (num_logprobs != NO_LOGPROBS).any()
        if steps is not EAGER and not needs_logits:
            return StepHandle(plan, steps.replay("head", plan.num_seqs), targets=targets)
        hidden = head.hidden if head.sample_indices is None else head.hidden[head.sample_indices]
        logits = self.model.compute_logits(hidden)
        token_ids, edited_logits = self.sampler.sample(logits, head.rows, head.positions, edits)
        if not needs_logits:
            return StepHandle(plan, token_ids, targets=targets)
        if self.config.logprobs_mode == "raw_logprobs":
            del edited_logits  # before log-probabilities take memory
            logprobs = start_logprobs(plan, num_logprobs, token_ids, logits, self.backend)
        else:
            logprobs = start_logprobs(plan, num_logprobs, token_ids, edited_logits, self.backend, asked)
        return StepHandle(plan, token_ids, logprobs, targets)

    def forward(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        """Compute the hidden states of all tokens, [num_tokens, hidden]. Returns the step's inputs, too."""
        return self.run_model(self.make_inputs(plan.num_seqs, plan.num_tokens).with_lengths(plan))

    def forward_decodes(self, num_seqs: int) -> tuple[StepInputs, Tensor]:
        """Compute as `forward` does, in a step of which each sequence computes one token.

        This is what `Steps` record. So it depends on no number of a plan but num_seqs.
        """
        return self.run_model(self.make_inputs(num_seqs, num_seqs))

    def sample_decodes(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Sample one token for each sequence of such a step, without edits. Returns int32 [num_seqs].

        The sampled token's index in its sequence is the number of tokens before it: seq_lens.
        """
        return self.sampler.sample(self.model.compute_logits(hidden), inputs.rows, inputs.seq_lens)[0]

    def make_inputs(self, num_seqs: int, num_tokens: int) -> StepInputs:
        """Make the inputs of the layers from the plan in the staging buffer, and from the tables."""
        lengths = find_lengths(num_seqs, num_tokens)
        rows, num_computed, num_scheduled, _, _, token_ids, *_ = torch.split(
            self.staging.buffer[: sum(lengths)], lengths
        )
        tables = (self.device_rows.block_tables, self.device_rows.last_token)
        planned = (rows, num_computed, num_scheduled, token_ids)
        return self.backend.step_inputs(*planned, *tables, self.config.block_size)

    def run_model(self, inputs: StepInputs) -> tuple[StepInputs, Tensor]:
        """Compute the hidden states of all tokens. Returns the inputs, prepared for attention, too.

        Attention is prepared once for all layers, by the shape of any layer's keys and values.
        """
        cache = next((cache for cache in self.caches if isinstance(cache, KVCache)), None)
        if cache is not None:
            num_heads = self.hf_config.num_attention_heads // self.parallel.size
            inputs = self.backend.prepare_attention(inputs, cache, num_heads)
        return inputs, self.model(inputs, self.caches)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context manager. In its `with` block this thread computes on this runner's device."""
        with self.backend.on_device(), torch.inference_mode(), self.backend.with_threads():
            yield

    def reason_to_close(self) -> str | None:
        """Return why no further step can run after a failed step; None if the next step can run."""
        return self.backend.why_broken()

    # ---- the KV cache

    def count_block_bytes(self) -> int:
        """Return the bytes of one block on this rank: the keys and values of all layers, and of the draft model."""
        own = self.sizes.kv_bytes(self.kv_dtype) * self.config.block_size
        return own + (self.draft.count_block_bytes() if self.draft is not None else 0)

    def count_state_bytes(self) -> int:
        """Return the bytes of this rank's states. In place of keys and values, a layer of linear attention keeps a
        state for each row, the padding row included. Most models have no such layer, so the result is 0."""
        return self.sizes.row_bytes(self.dtype) * (self.config.max_num_seqs + 1)

    def make_caches(self, num_blocks: int) -> list[LayerCache]:
        """Return the cache of each layer: blocks for keys and values, or a state for each row."""
        size = CacheSize(num_blocks, self.config.block_size, self.config.max_num_seqs + 1, self.kv_dtype)
        layers: Iterable[Any] = self.model.layers
        return [layer.self_attn.make_cache(size, self.dtype, self.device) for layer in layers]

    def fill_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache of this runner and of the draft model, and make what records and replays steps."""
        if self.draft is not None:
            self.draft.fill_cache(num_blocks)
        self.caches = self.make_caches(num_blocks)
        self.steps = self.backend.make_steps(self)
        # The first step may run in another thread. On a GPU that thread has a stream of its own, which does not wait
        # for the stream of this thread. So this thread waits here until the device has done its work.
        self.backend.synchronize()

    def free_cache(self) -> None:
        """Free the KV cache. Recorded steps go first, because they use addresses in the cache."""
        self.steps.release()
        self.steps = EAGER
        self.caches = []

    # ---- the model

    def load_model(self) -> None:
        """Make the model and read its weights: when the runner is made, and after `free_model`."""
        quantizer = self.quantizer
        advice = "choose a smaller model"
        if quantizer is None:
            advice += ', a smaller dtype, or quantization="int8"'
        check_free_memory(
            self.sizes.weight_bytes(self.dtype, quantizer), self.backend.free_memory(), "the weights", advice
        )
        with torch.device("meta"), default_dtype(self.dtype):
            self.model = self.decoder(self.hf_config, self.backend, self.parallel)
        coded = () if quantizer is None else quantizer.list_matrices(self.model)
        allocate(self.model, self.device, but=coded)  # codes take the place of these
        self.model.fill_tables(self.hf_config, self.config.max_model_len, self.device)
        self.backend.prepare_weights(parameter for parameter in self.model.parameters() if not parameter.is_meta)
        self._read_weights(self.model)
        self.backend.pack_weights(self.model.modules())

    def free_model(self) -> None:
        """Free the weights. Nothing may be launched before `load_model` has run."""
        del self.model

    def close(self) -> None:
        """Free the device's memory for good."""
        if self.draft is not None:
            self.draft.close()
        backend = self.backend
        with suppress(RuntimeError), backend.on_device():  # after a CUDA error every call fails; free the rest anyway
            backend.synchronize()
        with suppress(RuntimeError):
            self.steps.release()
        self.steps = EAGER
        self.caches = []
        if hasattr(self, "model"):
            self.free_model()
        del self.backend, self.sampler
        with suppress(RuntimeError):
            backend.release_memory()
