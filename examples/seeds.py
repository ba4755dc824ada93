"""The same seed, the same text. To run it on vLLM, change the import and the name of the model."""

from nanovllm import LLM, SamplingParams

MODEL = "tiny-qwen3"  # the built-in model; with vLLM use, for example, Qwen/Qwen3-0.6B


def main() -> None:
    llm = LLM(model=MODEL, max_model_len=512, seed=0)
    conversation = [{"role": "user", "content": "tell me a story about a fox"}]
    seeds = [1, 2, 1]
    params = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=40, seed=seed) for seed in seeds]
    outputs = llm.chat([conversation] * len(seeds), params, chat_template_kwargs={"enable_thinking": False})
    for seed, output in zip(seeds, outputs, strict=True):
        print(f"seed {seed}: {output.outputs[0].text!r}")
    print(f"seed 1 twice, the same text: {outputs[0].outputs[0].text == outputs[2].outputs[0].text}")


if __name__ == "__main__":
    main()
