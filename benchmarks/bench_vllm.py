"""One measurement of vLLM, for bench.py --compare vllm; run by the interpreter that has vLLM, without nanovllm.

Reads a JSON specification (bench_compare.py writes it); the last line printed is a JSON document.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm

from benchmarks.bench_worker import Run, measure


def load(spec: dict[str, Any]) -> Run:
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

    return run


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    measure(lambda: load(spec), spec, {"vllm": vllm.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
