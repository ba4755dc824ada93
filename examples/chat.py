"""Answer conversations. To run it on vLLM, change the import and the name of the model."""

from nanovllm import LLM

MODEL = "tiny-qwen3"  # the built-in model; with vLLM use, for example, Qwen/Qwen3-0.6B


def main() -> None:
    llm = LLM(model=MODEL, max_model_len=512)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.temperature = 0.0
    sampling_params.max_tokens = 100

    conversation = [{"role": "user", "content": "what is the capital of Japan?"}]
    outputs = llm.chat(
        conversation,
        sampling_params,
        use_tqdm=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    print(outputs[0].outputs[0].text)

    conversations = [
        [{"role": "user", "content": [{"type": "text", "text": "count from 7 to 21"}]}],
        [{"role": "user", "content": "what is the capital of France?"}],
    ]
    outputs = llm.chat(
        messages=conversations,
        sampling_params=sampling_params,
        use_tqdm=True,
        add_generation_prompt=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    for output in outputs:
        print(output.outputs[0].text)


if __name__ == "__main__":
    main()
