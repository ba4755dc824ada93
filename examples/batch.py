"""Many prompts at once, each with its own limits. To run it on vLLM, change the import and the name of the model."""

import time

from nanovllm import LLM, SamplingParams

MODEL = "tiny-qwen3"  # the built-in model; with vLLM use, for example, Qwen/Qwen3-0.6B


def main() -> None:
    llm = LLM(model=MODEL, max_model_len=512, max_num_seqs=64, disable_log_stats=True)
    conversations = [[{"role": "user", "content": f"what is {n} + {n + 3}?"}] for n in range(2, 42)]
    params = [
        SamplingParams(n=1, temperature=0.0, max_tokens=16 + i % 3, stop=["\n\n"], logprobs=1)
        for i in range(len(conversations))
    ]
    start = time.perf_counter()
    outputs = llm.chat(conversations, params, chat_template_kwargs={"enable_thinking": False})
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} answers, {num_tokens} tokens in {seconds:.1f} s")
    for output in outputs[:3]:
        completion = output.outputs[0]
        print(f"{completion.text!r} ({completion.finish_reason}, log-probability {completion.cumulative_logprob:.2f})")


if __name__ == "__main__":
    main()
