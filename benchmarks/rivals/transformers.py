"""Measures transformers once, in one of two modes.

static      generate() on left-padded batches. Each batch runs until its longest output is done; only the tokens that
            the workload asks for count.
continuous  the continuous batching of transformers, over a paged cache
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.rivals.worker import CannotRun, Engine, main

PAGE = 256


def run_static(model: Any, workload: dict[str, Any], temperature: float, batch_size: int) -> int:
    prompts = workload["prompts"]
    output_lens = workload["output_lens"]
    device = model.device
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        lens = output_lens[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=device)
        config = sampling(temperature, max_new_tokens=max(lens))
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        assert out.shape[1] == width + max(lens)
    return sum(output_lens)


def run_continuous(model: Any, workload: dict[str, Any], temperature: float) -> int:
    prompts = workload["prompts"]
    output_lens = workload["output_lens"]
    pages = [-(-(len(prompt) + n) // PAGE) for prompt, n in zip(prompts, output_lens, strict=True)]
    # Set num_blocks and max_batch_tokens, because transformers would choose values that take ten gigabytes.
    batching = transformers.ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=sum(pages) + 8,
        max_batch_tokens=max(sum(map(len, prompts)) // 4, max(map(len, prompts)), len(prompts)),
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(
        generation_config=sampling(temperature, max_new_tokens=max(output_lens)), continuous_batching_config=batching
    )
    manager.start()
    for prompt, n in zip(prompts, output_lens, strict=True):
        manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1)
    num_tokens = num_done = 0
    while num_done < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("continuous batching stopped")
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            num_done += 1
            num_tokens += len(result.generated_tokens)
    manager.stop(block=True)
    return num_tokens


def sampling(temperature: float, **changes: Any) -> GenerationConfig:
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    return GenerationConfig(**how, eos_token_id=None, pad_token_id=0, **changes)


def load(spec: dict[str, Any], mode: str) -> Engine:
    if mode == "continuous" and not hasattr(transformers, "ContinuousBatchingConfig"):
        raise CannotRun(f"transformers {transformers.__version__} has no continuous batching")
    torch.manual_seed(0)
    dtype = getattr(torch, spec["dtype"])
    path = Path(spec["model"])
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).to(spec["device"]).eval()

    @torch.inference_mode()
    def run(workload: dict[str, Any]) -> int:
        if mode == "static":
            return run_static(model, workload, spec["temperature"], spec["static_batch"])
        return run_continuous(model, workload, spec["temperature"])

    return Engine(run, f"padded batches of {spec['static_batch']}" if mode == "static" else "")


if __name__ == "__main__":
    main(load, {"transformers": transformers.__version__, "torch": torch.__version__})
