"""The engine on a real GPU: `pytest -m gpu tests/gpu/test_gpu_engine.py`, in one process: it counts free memory."""

import gc
import json

import pytest
import torch
from helpers.tiny import save_random
from transformers import Qwen3MoeForCausalLM

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "count from 7 to 31",
    "what is 17 + 25?",
    "what is the capital of France?",
]
GREEDY = SamplingParams(temperature=0, max_tokens=200)
EXACT = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 12, "kvcache_memory_bytes": 1 << 28}


def answers(params=GREEDY, **options):
    with LLM("tiny-qwen3", **EXACT, **options) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [output["token_ids"] for output in llm.chat(conversations, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def cpu_answers():
    return answers(device="cpu", attention_backend="torch")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_graph_equals_eager_equals_cpu(cpu_answers, overlap, enforce_eager):
    assert answers(device="cuda", overlap=overlap, enforce_eager=enforce_eager) == cpu_answers


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"num_kvcache_blocks": 9}, {"max_num_seqs": 3}])
def test_chunks_preemption_and_padding_change_no_token(cpu_answers, options):
    with LLM("tiny-qwen3", **{**EXACT, "kvcache_memory_bytes": None, "num_kvcache_blocks": 64, **options}) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == cpu_answers


def test_seeded_sampling_is_the_same_overlapped_or_not_graph_or_eager():
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=30, max_tokens=100, seed=7)
    reference = answers(params, overlap=False, enforce_eager=True)
    assert answers(params) == reference


def test_a_decode_step_waits_for_nothing_but_the_tokens():
    """Some of the steps that are watched begin a new block."""
    with LLM("tiny-qwen3", **EXACT, kvcache_block_size=16) as llm:
        for i in range(8):
            llm.engine.add(llm.prepare([5, 6, 7 + i], SamplingParams(max_tokens=64, ignore_eos=True)))
        for _ in range(8):  # prefill, and kernels compiled
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(16):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        llm.engine.abort_all()


def test_edited_steps_leave_the_captured_sampler_and_give_the_same_tokens():
    """Rows that ask beside rows that do not, at depth 2: graphs to the hidden states, then edits and sampler."""
    params = [
        SamplingParams(1.0, 48, seed=1, ignore_eos=True, presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(1.0, 48, seed=2, ignore_eos=True),
        SamplingParams(0, 48, min_tokens=40, logit_bias={9: 2.0}, bad_words=["the", "a word"]),
        SamplingParams(0.7, 48, seed=3, allowed_token_ids=list(range(100, 400)), frequency_penalty=0.5),
    ]
    prompts = [[5, 6, 7], [8, 9], [10] * 40, [11]]
    found = []
    for eager in (True, False):
        with LLM("tiny-qwen3", **EXACT, enforce_eager=eager) as llm:
            found.append([output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "experts", "drafts"])
def test_no_kernel_is_compiled_after_the_start(kind, dtype, tmp_path):
    """Whether or not memory was profiled: an explicit number of blocks skips that.

    Edited logits are float32 in any model. A long prompt takes other tiles of experts than decodes do.
    """
    import triton

    options = {"dtype": dtype, "max_model_len": 640, "max_num_seqs": 12, "num_kvcache_blocks": 256}
    model = "tiny-qwen3"
    if kind == "experts":
        shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        save_random(tmp_path, model_class=Qwen3MoeForCausalLM, max_position_embeddings=1024, **shape)
        model = tmp_path
    elif kind == "drafts":
        options["speculative_config"] = {"model": "tiny-qwen3", "num_speculative_tokens": 3}
    requests = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=20),
        SamplingParams(temperature=0.8, max_tokens=20, repetition_penalty=1.1),
        SamplingParams(temperature=0.8, max_tokens=20, allowed_token_ids=list(range(100))),
        SamplingParams(temperature=0.8, max_tokens=20, presence_penalty=0.5, min_tokens=9, logit_bias={9: 2.0}),
        SamplingParams(temperature=0.8, max_tokens=20, logprobs=3, prompt_logprobs=0),
        SamplingParams(temperature=0.8, max_tokens=20, logprobs=0, prompt_logprobs=2),
    ]
    compiled = []
    with LLM(model, **options) as llm:
        triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["repr"])
        try:
            for params in requests:
                llm.generate([[5, 6, 7] * n for n in (1, 2, 40, 200)], params, use_tqdm=False)
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_twenty_engines_one_after_another_leak_no_memory():
    used = []
    for _ in range(20):
        with LLM("tiny-qwen3", **EXACT) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    # The first cycles load libraries and kernels for good; after them nothing may grow but by noise.
    assert used[-1] - used[4] < 16 << 20


def test_the_cache_takes_what_utilization_leaves_and_no_more():
    before = torch.cuda.mem_get_info()[0]
    with LLM("tiny-qwen3", max_model_len=512, gpu_memory_utilization=0.5) as llm:
        llm.generate([[1, 2, 3]] * 64, SamplingParams(max_tokens=16), use_tqdm=False)
        free, total = torch.cuda.mem_get_info()
        assert total - free < 0.5 * total + (1 << 30)
        assert llm.stats()["num_blocks"] > 1000
    assert before - torch.cuda.mem_get_info()[0] < 2 << 30


def test_a_trace_shows_the_device_s_time(tmp_path):
    path = tmp_path / "run.json"
    with LLM("tiny-qwen3", **EXACT, trace=str(path)) as llm:
        llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    steps = [event for event in json.loads(path.read_text()) if event["name"] == "step"]
    assert len(steps) >= 32 and all(event["dur"] > 0 for event in steps)
