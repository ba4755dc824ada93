"""Ask a model a few questions, in one batch: `python example.py`, or `python example.py --model Qwen/Qwen3-0.6B`."""

import argparse

from nanovllm import LLM, SamplingParams

QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "count from 7 to 21",
    "what is 17 + 25?",
    "what is the capital of France?",
    "tell me a story about a fox",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model a few questions, in one batch.")
    parser.add_argument("--model", default="tiny-qwen3", help="a folder, a Hugging Face id, or the built-in model")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 always takes the most likely token")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="questions of your own")
    args = parser.parse_args()

    conversations = [[{"role": "user", "content": question}] for question in args.questions]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(args.model, max_model_len=2048) as llm:
        outputs = llm.chat(conversations, params, chat_template_kwargs={"enable_thinking": False})

    for question, output in zip(args.questions, outputs, strict=True):
        print(f"\n> {question}\n{output['text'].strip()}")


if __name__ == "__main__":
    main()
