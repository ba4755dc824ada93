"""Order documents by how well they answer a query: with Qwen3-Reranker, or with a model that has a head for scores."""

import argparse

from nanovllm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-Reranker-0.6B", help="default: %(default)s")
    parser.add_argument("query")
    parser.add_argument("documents", nargs="+")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        for one in llm.rerank(args.query, args.documents):
            print(f"{one.relevance_score:.3f}  {one.document}")


if __name__ == "__main__":
    main()
