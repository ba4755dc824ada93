"""Prompts with one long beginning, computed once. To run it on vLLM, change the import and the name of the model."""

from nanovllm import LLM, SamplingParams

MODEL = "tiny-qwen3"  # the built-in model; with vLLM use, for example, Qwen/Qwen3-0.6B

RULES = "You answer questions of pupils. Be brief, be friendly, and say so if you do not know. " * 6
QUESTIONS = ["what is the capital of Spain?", "what is the capital of Italy?", "what is 8 + 9?"]


def main() -> None:
    llm = LLM(model=MODEL, max_model_len=1024, enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=48)
    conversations = [
        [{"role": "system", "content": RULES}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    first = llm.chat(conversations[:1], sampling_params, chat_template_kwargs={"enable_thinking": False})
    print(f"first: {first[0].num_cached_tokens} of {len(first[0].prompt_token_ids)} tokens were cached")
    outputs = llm.chat(conversations, sampling_params, chat_template_kwargs={"enable_thinking": False})
    for output in outputs:
        print(f"then: {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were cached")
    same = outputs[0].outputs[0].text == first[0].outputs[0].text
    print(f"the same answer with a cached beginning: {same}")


if __name__ == "__main__":
    main()
