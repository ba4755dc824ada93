"""Answer each question several times, and show the answer that a reward model likes best."""

import argparse

from nanovllm import LLM, SamplingParams

QUESTIONS = ["what is the capital of Japan?", "what is 17 + 25?", "count from 3 to 9"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-qwen3", help="answers (default: %(default)s)")
    parser.add_argument("--reward-model", default="Skywork/Skywork-Reward-V2-Qwen3-0.6B", help="default: %(default)s")
    parser.add_argument("-n", type=int, default=8, help="answers to each question (default: %(default)s)")
    args = parser.parse_args()
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(args.model) as llm:
        outputs = llm.chat(asked, SamplingParams(n=args.n, temperature=1.0, max_tokens=64, seed=0))
    answers = [[completion.text for completion in output.outputs] for output in outputs]
    with LLM(args.reward_model) as judge:
        # What is judged ends with the answer: no further one is opened.
        closed = {"add_generation_prompt": False}
        prompts = [
            judge.render_chat([*messages, {"role": "assistant", "content": text}], closed)
            for messages, texts in zip(asked, answers, strict=True)
            for text in texts
        ]
        rewards = judge.reward(prompts)
    for i, question in enumerate(QUESTIONS):
        own = rewards[i * args.n : (i + 1) * args.n]
        best = max(range(args.n), key=own.__getitem__)
        print(f"{question}\n  {own[best]:.3f} of {min(own):.3f} to {max(own):.3f}: {answers[i][best]!r}")


if __name__ == "__main__":
    main()
