"""Order documents by how well they answer a query, with a reranker of Qwen3's kind.

The model reads the query and a document, and answers "yes" or "no". The score is the probability of "yes" among these
two answers.
"""

import argparse
import math

from nanovllm import LLM

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
TEMPLATE = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<Instruct>: {task}\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def rerank(llm: LLM, query: str, documents: list[str], task: str = TASK) -> list[float]:
    """Return the score of each document, from 0 to 1."""
    tokenizer = llm.get_tokenizer()
    answers = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    prompts = []
    for document in documents:
        text = TEMPLATE.format(system=SYSTEM, task=task, query=query, document=document)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    # The pairs of one document stand side by side, so that they share its keys and values.
    pairs = [(prompt, answer) for prompt in prompts for answer in answers]
    scores = llm.score([prompt for prompt, _ in pairs], [answer for _, answer in pairs], use_tqdm=False)
    logprobs = [score["logprob"] for score in scores]
    return [1 / (1 + math.exp(no - yes)) for yes, no in zip(logprobs[::2], logprobs[1::2], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-Reranker-0.6B", help="default: %(default)s")
    parser.add_argument("query")
    parser.add_argument("documents", nargs="+")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        scores = rerank(llm, args.query, args.documents)
    for score, document in sorted(zip(scores, args.documents, strict=True), reverse=True):
        print(f"{score:.3f}  {document}")


if __name__ == "__main__":
    main()
