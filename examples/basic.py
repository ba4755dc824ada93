"""Complete a few prompts. To run it on vLLM, change the import and the name of the model."""

from nanovllm import LLM, SamplingParams

MODEL = "tiny-qwen3"  # the built-in model; with vLLM use, for example, Qwen/Qwen3-0.6B

QUESTIONS = ["what is the capital of France?", "count from 3 to 9", "what is 17 + 25?"]


def main() -> None:
    llm = LLM(model=MODEL, max_model_len=512, gpu_memory_utilization=0.8)
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for question in QUESTIONS
    ]
    sampling_params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=64)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        completion = output.outputs[0]
        print(f"prompt of {len(output.prompt_token_ids)} tokens: {output.prompt!r}")
        print(f"{len(completion.token_ids)} tokens, {completion.finish_reason}: {completion.text!r}")


if __name__ == "__main__":
    main()
