"""Measures vLLM once. An interpreter that has vLLM runs this file; scripts/rival_env.sh makes one."""

from typing import Any

import torch
import vllm

from benchmarks.rivals.worker import CannotRun, Engine, computes_in_bfloat16, main


def load(spec: dict[str, Any], mode: str) -> Engine:
    if spec["device"] == "cpu" and spec["dtype"] == "bfloat16" and not computes_in_bfloat16():
        raise CannotRun("this processor has no bfloat16 instructions: vLLM emulates them, for many minutes a run")
    llm = vllm.LLM(
        spec["model"],
        dtype=spec["dtype"],
        skip_tokenizer_init=True,
        max_model_len=spec["max_model_len"],
        max_num_seqs=spec["max_num_seqs"],
        max_num_batched_tokens=spec["max_num_batched_tokens"],
        tensor_parallel_size=spec["tensor_parallel_size"],
        seed=0,
    )

    def run(workload: dict[str, Any]) -> int:
        params = [
            vllm.SamplingParams(temperature=spec["temperature"], ignore_eos=True, max_tokens=n, detokenize=False)
            for n in workload["output_lens"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return Engine(run, type(vllm.platforms.current_platform).__name__)


if __name__ == "__main__":
    main(load, {"vllm": vllm.__version__, "torch": torch.__version__})
