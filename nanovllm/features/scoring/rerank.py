"""How well documents answer a query: by a head that scores pairs, or by a model that answers "yes" or "no"."""

import math
from collections.abc import Sequence
from typing import Any

from nanovllm.engine.pooling import Pooling
from nanovllm.features.scoring.heads import Head, classify_prompts
from nanovllm.features.scoring.score import score_pairs
from nanovllm.outputs import Ranking
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote, refuse

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
"""That of Qwen3-Reranker's model card."""
OF_TEMPLATE = ("<|im_start|>", "<|im_end|>")
"""The tokens that it needs."""


def rerank_documents(
    llm: Any, query: str, documents: Sequence[str], instruction: str | None, show: bool
) -> list[Ranking]:
    """Order documents by how well they answer a query: see `LLM.rerank`."""
    llm.engine.claim.check()
    if not isinstance(query, str):
        raise refuse(query, "query", "a string")
    if isinstance(documents, str) or not all(isinstance(document, str) for document in documents):
        raise refuse(documents, "documents", "a list of strings")
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"rerank needs a tokenizer, and {quote(llm.engine.config.model)} has none")
    pooling: Pooling = llm.engine.facts.pooling
    if isinstance(pooling, Head):
        scores = score_by_head(llm, pooling, query, documents, instruction, show)
    else:
        scores = score_by_answer(llm, tokenizer, query, documents, instruction or INSTRUCTION, show)
    ranked = [Ranking(index=i, relevance_score=score, document=documents[i]) for i, score in enumerate(scores)]
    return sorted(ranked, key=lambda one: -one["relevance_score"])


def score_by_head(
    llm: Any, head: Head, query: str, documents: Sequence[str], instruction: str | None, show: bool
) -> list[float]:
    """Return the score of each pair, tokenised as sentence-transformers' CrossEncoder does it."""
    if len(head.labels) != 1:
        raise ValueError(f"the model's head has {len(head.labels)} labels; a reranker's has one")
    if instruction is not None:
        raise refuse(instruction, "instruction", "None: the model has a head, so write what it expects into the query")
    pairs = llm.get_tokenizer()([query] * len(documents), list(documents))["input_ids"] if documents else []
    return [float(one.probs[0]) for one in classify_prompts(llm, pairs, show)]


def score_by_answer(
    llm: Any, tokenizer: Tokenizer, query: str, documents: Sequence[str], instruction: str, show: bool
) -> list[float]:
    """Return the probability of "yes" beside "no" after Qwen3-Reranker's template, for each document."""
    encode = llm.get_tokenizer().encode
    answers = [encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(encode(token, add_special_tokens=False)) != 1 for token in OF_TEMPLATE):
        raise ValueError(
            f"{quote(llm.engine.config.model)} is no reranker: rerank needs a model with a head, or one with the "
            f"tokens {' and '.join(OF_TEMPLATE)}, as Qwen3-Reranker has them"
        )
    texts = [TEMPLATE.format(instruction=instruction, query=query, document=document) for document in documents]
    prompts = [encode(text, add_special_tokens=False) for text in texts]
    # The pairs of one document stand side by side, so that they share its keys and values.
    pairs = [(prompt, answer) for prompt in prompts for answer in answers]
    if not pairs:
        return []
    scores = score_pairs(llm, [prompt for prompt, _ in pairs], [answer for _, answer in pairs], show)
    logprobs = [score["logprob"] for score in scores]
    return [1 / (1 + math.exp(no - yes)) for yes, no in zip(logprobs[::2], logprobs[1::2], strict=True)]
