"""Compares launches by `launch` with Triton's own, on a driver that launches nothing; prints one JSON object.

A program of its own, because Triton's compiler and its interpreter cannot share a process.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import triton

from helpers.pretend_cuda import DEVICE, PretendDriver, noted, pretend_runner, unscored_plan
from nanovllm.backends.gpu import launch as kernel_launches
from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.backends.gpu.launch import Launch, compile_launches, launch, redirect_launches
from nanovllm.backends.gpu.paged_prefill import paged_prefill
from nanovllm.backends.gpu.quantized import Operators
from nanovllm.backends.gpu.rms_norm import add_rms_norm
from nanovllm.backends.gpu.startup import compile_kernels
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.backends.steps import EAGER
from nanovllm.engine.plan import StepPlan
from nanovllm.features.distributed.collectives import GroupParallel
from nanovllm.features.distributed.pipeline import FirstStage, PipelineHandle, StageInputs, StageParallel, StageRunner
from nanovllm.features.edits.logit_edits import LogitEdits, PenaltyCounts
from nanovllm.features.families.qwen3_moe.decoder import Experts
from nanovllm.features.quantized.codes import Codes, InputScales, Scales
from nanovllm.models.layers.linear import MatrixModule
from nanovllm.ops.attention import AttentionVariant, KVCache
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.integers import ceil_div

NUM_LAUNCHES = 196
NUM_LAYERS = 4
"""The first four layers of a model launch all that the further ones do: Qwen3.5 has one with attention among four."""
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 512,
    "max_window_layers": 2,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
}
HOOKS = (6, 7, 8)
"""Among the arguments of a launch: what profilers hang on it. A direct launch has none."""


def best_us(work: Callable[[], None]) -> float:
    """Microseconds of the fastest of twenty."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def count_calls(work: Callable[[], None]) -> int:
    """Count the functions, those in C included, that a piece of work calls. A busy machine changes no count."""
    calls = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def as_triton_does(one: Launch) -> None:
    one.kernel[one.grid](*one.args, **one.config)


def _value(x: object) -> object:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def same_launches(driver: PretendDriver, launches: list[Launch]) -> bool:
    """Whether both ways give the driver the same grids, kernels and arguments."""
    given = []
    for how in (lambda one: launch(*one), as_triton_does):
        driver.launches.clear()
        for one in launches:
            how(one)
        given.append([[_value(x) for i, x in enumerate(args) if i not in HOOKS] for args in driver.launches])
    return len(given[0]) == len(launches) and given[0] == given[1]


def launch_attention() -> list[Launch]:
    """The launches of a prompt's attention without sinks, where a pointer is None, and with them."""
    cache = KVCache(*(torch.zeros(1, 16, 1, 32, dtype=torch.bfloat16) for _ in "kv"))
    q = torch.zeros(3, 2, 32, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    tables = torch.zeros(1, 16, dtype=torch.int32)
    with noted() as launches:
        for variant in (None, AttentionVariant(window=2, softcap=3.0, sinks=torch.zeros(2))):
            paged_prefill(q, cache, ends, ends[1:], tables, 3, 1.0, torch.empty_like(q), variant)
    return launches


def compile_ahead() -> tuple[int, int]:
    """How many kernels a runner compiles as it starts, and how many a decode and a mixed step then find missing."""

    def num_compiled() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    with pretend_runner(num_layers=NUM_LAYERS, max_model_len=4096, max_num_seqs=300) as runner:
        plan = unscored_plan([1, 1, 1, 100, 197])
        with noted() as launches:
            CudaGraphs(runner).run_once(48)
            CudaGraphs(runner).run_once(300)
            run_step(runner, plan)
        kernels = {one.kernel.__name__: one.kernel for one in launches}.values()
        before = num_compiled()
        compile_kernels(runner, runs_on_fake_tensors=True)
        ahead = num_compiled()
        with compile_launches(show_progress=False):
            for one in launches:
                launch(*one)
        return ahead - before, num_compiled() - ahead


# ---- which kernels the start compiles, and which steps need: told by Triton's own keys, with nothing compiled


@contextmanager
def wanted() -> Iterator[set[str]]:
    """Yield a set, to which each kernel is added that Triton would compile now; none is compiled."""
    found: set[str] = set()

    def note(key: str, repr: str, **others: Any) -> bool:
        found.add(f"{repr} {key}")
        return True  # that the kernel is there already

    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = None


@contextmanager
def misaligned() -> Iterator[set[str]]:
    """Yield a set, to which each argument is added whose address is no multiple of 16 though its kernel wants one.

    Triton compiles a variant for such an address, and the start compiles none.
    """
    found: set[str] = set()
    receive = kernel_launches._receiver.get()
    assert receive is not None

    def note(one: Launch) -> None:
        _, aligned, _, _ = kernel_launches.get_parameters(one.kernel)
        for i in (i for i in aligned if one.args[i] is not None):
            byte = one.args[i].storage_offset() * one.args[i].element_size()
            if byte % 16:
                found.add(f"{one.kernel.arg_names[i]} of {one.kernel.__name__} at byte {byte}")
        receive(one)

    with redirect_launches(note):
        yield found


def run_step(runner: ModelRunner, plan: StepPlan, edits: LogitEdits | None = None) -> None:
    runner.run_head(runner.run_layers(plan, EAGER), edits)


def make_edits(num_rows: int, vocab: int, has_masks: bool, has_penalties: bool) -> LogitEdits:
    """The edits of a step whose first rows are edited. A grammar gives the sampler a mask and nothing else."""
    indices = np.arange(num_rows, dtype=np.int32)
    masks = np.full((num_rows, ceil_div(vocab, 32)), -1, np.int32) if has_masks else None
    penalties = np.ones((num_rows, 3), np.float32) if has_penalties else None
    bias_index = np.zeros(1, np.int64)
    bias = np.ones(1, np.float32)
    return LogitEdits(indices, indices, masks, bias_index, bias, penalties, (), PenaltyCounts(num_rows))


class Unreplayed(CudaGraphs):
    """Runs a part of a step where it would be replayed: its kernels are those that a capture launches."""

    def replay(self, part: Any, size: int) -> Any:
        if part == "layers":
            self.layers = self._runner.forward_decodes(size)
            return self.layers
        return self._runner.sample_decodes(*self.layers)


def run_replayed(runner: ModelRunner, size: int, edits: LogitEdits | None = None) -> None:
    """Run a decode step of so many sequences as graphs do. With edits or log-probabilities it samples eagerly."""
    if edits is not None:
        runner.device_rows.sampling_cpu["is_edited"] = 1
    plan = unscored_plan([1] * size)
    runner.run_head(runner.run_layers(plan, Unreplayed(runner)), edits)
    runner.device_rows.sampling_cpu["is_edited"] = 0


def serve_edits(runner: ModelRunner) -> None:
    """Steps with masks (of a grammar too), with penalties, with both, and with a bias alone; eager and replayed."""
    vocab = runner.model.lm_head.vocab_size
    plan = unscored_plan([1, 1, 40])
    for has_masks in (False, True):
        for has_penalties in (False, True):
            edits = make_edits(2, vocab, has_masks, has_penalties)
            runner.device_rows.sampling_cpu["is_edited"] = 1
            run_step(runner, plan, edits)
            run_replayed(runner, 48, edits)


def serve_logprobs(runner: ModelRunner) -> None:
    """Steps that score all tokens of prompts, that ask for log-probabilities, and for the likeliest tokens."""
    scored = StepPlan.largest(3, 300, 1000)
    sampled = unscored_plan([1, 1, 40])
    for count in (0, 3):
        runner.device_rows.sampling_cpu["num_prompt_logprobs"] = count
        runner.device_rows.sampling_cpu["num_logprobs"] = count
        run_step(runner, scored)
        run_step(runner, sampled)
        run_replayed(runner, 48)


def serve_prompts(runner: ModelRunner) -> None:
    """Decodes and prompts of any number of tokens, one at each end of every range of tiles."""
    for num_tokens in (1, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 512, 513, 2000):
        run_step(runner, unscored_plan([num_tokens]))
        run_step(runner, unscored_plan([1, 1, num_tokens]))
    graphs = CudaGraphs(runner)
    for size in graphs.sizes:
        graphs.run_once(size)


def serve_drafts(runner: ModelRunner) -> None:
    """Verifies three drafts of each sequence, after passes of the draft model."""
    assert runner.draft is not None
    for lengths in ([1, 1], [1, 2, 2], [1, 40, 700]):
        run_step(runner.draft, unscored_plan(lengths))
    verified = StepPlan.largest(4, 16, 1000, num_drafts=3)
    assert verified.num_drafts.tolist() == [3] * 4
    run_step(runner, verified)
    runner.device_rows.sampling_cpu["is_edited"] = 1
    run_step(runner, verified, make_edits(16, runner.hf_config.vocab_size, True, True))


def one_rank_of_two(rank: int) -> GroupParallel:
    """A rank whose collectives exchange nothing, now as well as while kernels are compiled."""
    parallel = GroupParallel(rank, 2, "gloo", torch.device("cpu"))
    parallel.sends_nothing = True
    return parallel


def serve_as_a_rank(runner: ModelRunner) -> None:
    """Steps of prompts and decodes, of which rank 0 samples, and of edited logits, which only rank 0 has."""
    runner.parallel.sends_nothing = True
    serve_prompts(runner)
    if runner.parallel.rank == 0:
        serve_edits(runner)


def one_stage_of_three(rank: int) -> Callable[..., ModelRunner]:
    """Return what makes the runner of a stage, whose links carry tensors without values."""
    group: Any = SimpleNamespace(rank=rank, size=3, ranks_per_device=1, raise_failure=lambda: None)
    group.start_send = lambda x, rank: None
    group.receive = lambda shape, dtype, rank: torch.empty(shape, dtype=dtype, device=DEVICE)

    def make(config: Any, hf_config: Any, read_weights: Any, parallel: Any, **others: Any) -> StageRunner:
        others = {"quantizer": None, "group": group, "report": None, **others}
        return StageRunner(config, hf_config, read_weights, StageParallel(group), **others)

    return make


def serve_as_a_stage(runner: ModelRunner) -> None:
    """Prompts, decodes by graphs, and on rank 0 also scores, log-probabilities and edits."""
    assert isinstance(runner, StageRunner) and runner.inputs is not None
    first = FirstStage(runner, runner._group, None)
    vocab = runner.hf_config.vocab_size
    plans = [unscored_plan([1] * decodes + [n]) for n in (2, 17, 65, 129, 513, 2000) for decodes in (0, 2)]

    def run(plan: StepPlan, edits: LogitEdits | None = None) -> None:
        if not runner.has_head:
            runner.run_stage(plan)
            return
        handle = PipelineHandle(first, 1, plan, edits)
        hidden = runner.receive(handle.num_wanted, 2, 1)
        head, steps, _ = handle.front
        runner.run_head(first._take_hidden(head, hidden, steps), edits, steps)

    def send(parts: list[Any]) -> torch.Tensor:
        return torch.zeros(sum(map(len, parts)), dtype=torch.int32, device=DEVICE)

    with mock.patch.object(runner.staging, "send", send):
        for plan in (*plans, unscored_plan([1]), StepPlan.largest(3, 300, 1000)):
            for count in (-1, 3):
                runner.device_rows.sampling_cpu["num_prompt_logprobs"] = max(count, 0)
                runner.device_rows.sampling_cpu["num_logprobs"] = count
                run(plan)
        graphs = Unreplayed(runner)
        for size in graphs.sizes:
            graphs.run_once(size)
        runner.steps = graphs
        for size in graphs.sizes if runner.has_head else ():
            edits = make_edits(size, vocab, has_masks=True, has_penalties=size % 2 == 0)
            runner.device_rows.sampling_cpu["is_edited"] = 1
            run(unscored_plan([1] * size), edits)


def quantize(runner: ModelRunner, bits: int, group_size: int | None, input_scales: InputScales | None = None) -> None:
    """Give every matrix but an untied embedding codes without values. Those of 4 bits have zeros."""
    operators = Operators(runner.backend)

    def make_codes(*shape: int) -> Codes:
        *outs, size = shape
        dtype = torch.int8 if bits == 8 else torch.uint8
        codes = torch.empty(*outs, size * bits // 8, dtype=dtype, device=DEVICE)
        scales = torch.empty(*outs, ceil_div(size, group_size or size), device=DEVICE)
        zeros = torch.empty(scales.shape, dtype=torch.int16, device=DEVICE) if bits == 4 else None
        return Codes(bits, codes, Scales(scales), zeros, group_size or size, input_scales=input_scales)

    for module in runner.model.modules():
        if isinstance(module, Experts):
            stacks = (make_codes(*stack.shape) for stack in module.list_matrices())
            module.packed = tuple(operators.lay(stack, runner.dtype) for stack in stacks)
        elif isinstance(module, MatrixModule) and (module is not runner.model.embed_tokens or runner.model.tied):
            module.packed = operators.lay(make_codes(*module.weight.shape), runner.dtype)


def missing(
    serve: Callable[[ModelRunner], None],
    model: str,
    draft: str | None = None,
    quantized: tuple[Any, ...] = (),
    **options: Any,
) -> list[str]:
    """Name the kernels that serving needs and the start does not compile, and the arguments at odd addresses.

    Args:
        quantized: the arguments of `quantize`; () if the model's matrices are not quantised.
    """
    options = {"num_layers": NUM_LAYERS, "max_model_len": 4096, "max_num_seqs": 300, **options}
    with ExitStack() as stack:
        runner = stack.enter_context(pretend_runner(model, **options))
        if draft is not None:
            runner.draft = stack.enter_context(pretend_runner(draft, **options))
        if quantized:
            quantize(runner, *quantized)
        if isinstance(runner, StageRunner):
            num_seqs = runner.config.max_num_seqs
            hidden_size = runner.hf_config.hidden_size
            runner.inputs = StageInputs(num_seqs, hidden_size, runner.dtype, runner.device)
        with wanted() as ahead:
            compile_kernels(runner, runs_on_fake_tensors=True)
        for one in (runner, runner.draft):
            if one is not None:
                one.caches = one.make_caches(100)
        with wanted() as needed, compile_launches(show_progress=False), misaligned() as others:
            serve(runner)
    assert ahead and needed
    return sorted(needed - ahead | others)


def missing_in_few_rows(**options: Any) -> list[str]:
    """Name what a model with our own products of few rows lacks: see `missing`."""
    with mock.patch.object(TritonKernels, "few_rows_bytes", sys.maxsize):
        return missing(serve_prompts, "qwen3-0.6b", **options)


def missing_kernels() -> dict[str, list[str]]:
    """By what is served: see `missing`."""
    return {
        "few rows": missing_in_few_rows(),
        "few rows, few sequences": missing_in_few_rows(max_num_seqs=4),
        "few rows, windows": missing_in_few_rows(changes=WINDOWS),
        "edits": missing(serve_edits, "qwen3-0.6b"),
        "edits in float16": missing(serve_edits, "qwen3-0.6b", dtype="float16"),
        "edits in float32": missing(serve_edits, "qwen3-0.6b", dtype="float32"),
        "log-probabilities": missing(serve_logprobs, "qwen3-0.6b"),
        "log-probabilities in float32": missing(serve_logprobs, "qwen3-0.6b", dtype="float32"),
        "windows": missing(serve_prompts, "qwen3-0.6b", changes=WINDOWS),
        "experts": missing(serve_prompts, "qwen3-30b-a3b"),
        "experts, few sequences": missing(serve_prompts, "qwen3-30b-a3b", max_num_seqs=4),
        "two experts for a token": missing(serve_prompts, "qwen3-30b-a3b", changes={"num_experts_per_tok": 2}),
        "states": missing(serve_prompts, "qwen3.5-0.8b"),
        "states and experts": missing(serve_prompts, "qwen3.5-35b-a3b"),
        "states and experts, int8": missing(serve_prompts, "qwen3.5-35b-a3b", quantized=(8, None)),
        "drafts": missing(serve_drafts, "qwen3-8b", draft="qwen3-0.6b"),
        "drafts by experts": missing(serve_drafts, "qwen3-0.6b", draft="qwen3-30b-a3b"),
        "keys and values in int8": missing(serve_prompts, "qwen3-0.6b", kv_cache_dtype="int8"),
        "drafts, keys and values in int8": missing(serve_drafts, "qwen3-8b", draft="qwen3-0.6b", kv_cache_dtype="int8"),
        "states, keys and values in int8": missing(serve_prompts, "qwen3.5-0.8b", kv_cache_dtype="int8"),
        "int8": missing(serve_prompts, "qwen3-0.6b", quantized=(8, None)),
        "w8a8": missing(serve_logprobs, "qwen3-0.6b", quantized=(8, None, InputScales.TOKEN)),
        "experts, w8a8": missing(serve_prompts, "qwen3-30b-a3b", quantized=(8, None, InputScales.TOKEN)),
        "states, w8a8": missing(serve_prompts, "qwen3.5-0.8b", quantized=(8, None, InputScales.TOKEN)),
        "int8, log-probabilities": missing(serve_logprobs, "qwen3-0.6b", quantized=(8, None)),
        "int4 by group, few sequences": missing(serve_prompts, "qwen3-8b", quantized=(4, 128), max_num_seqs=4),
        "experts, int8": missing(serve_prompts, "qwen3-30b-a3b", quantized=(8, None)),
        "experts, int4 by group": missing(serve_prompts, "qwen3-30b-a3b", quantized=(4, 128)),
        "rank 0 of two": missing(serve_as_a_rank, "qwen3-0.6b", parallel=one_rank_of_two(0)),
        "rank 1 of two": missing(serve_as_a_rank, "qwen3-30b-a3b", parallel=one_rank_of_two(1)),
        "the first stage": missing(serve_as_a_stage, "qwen3-0.6b", runner_class=one_stage_of_three(0)),
        "the first stage, odd sizes": missing(
            serve_as_a_stage, "qwen3-0.6b", runner_class=one_stage_of_three(0), max_num_seqs=7
        ),
        "a stage between": missing(serve_as_a_stage, "qwen3-0.6b", runner_class=one_stage_of_three(1)),
        "the last stage": missing(serve_as_a_stage, "qwen3-0.6b", runner_class=one_stage_of_three(2)),
    }


def main() -> None:
    driver = PretendDriver()
    triton.runtime.driver.set_active(driver)
    not_compiled = missing_kernels()  # first: of a kernel that is compiled Triton does not tell
    x = torch.zeros(9, 1024, dtype=torch.bfloat16)
    weight = torch.zeros(1024, dtype=torch.bfloat16)
    with noted() as launches:
        add_rms_norm(x, x, weight, 1e-6)
    launch(*launches[0])  # compiles
    odd = torch.zeros(9 * 1024 + 1, dtype=torch.bfloat16)[1:].view(9, 1024)
    with noted() as unaligned:
        add_rms_norm(odd, odd, weight, 1e-6)
    found: dict[str, Any] = {"missing": not_compiled}
    found["equal"] = same_launches(driver, launches) and same_launches(driver, launch_attention())
    found["unaligned_equal"] = same_launches(driver, unaligned)
    found["direct_us"] = best_us(lambda: [launch(*one) for one in launches * NUM_LAUNCHES]) / NUM_LAUNCHES
    found["triton_us"] = best_us(lambda: [as_triton_does(one) for one in launches * NUM_LAUNCHES]) / NUM_LAUNCHES
    found["direct_calls"] = count_calls(lambda: launch(*launches[0]))
    found["triton_calls"] = count_calls(lambda: as_triton_does(launches[0]))
    found["compiled_ahead"], found["compiled_by_steps"] = compile_ahead()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
