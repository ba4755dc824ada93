"""How well documents answer a query: by a head that scores pairs, or by a model that answers "yes" or "no"."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.pooling import Pooling
from nanovllm.features.scoring.heads import Head, prepare_texts, read_classification
from nanovllm.features.scoring.pair_files import PairFiles, read_pair_files
from nanovllm.features.scoring.score import read_score
from nanovllm.outputs import Output, Ranking
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import name_errors, read_column, tokenise_prompts
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote, refuse

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request

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
ANSWERS = ("yes", "no")
FILLERS = ("0", "1 2 3 4")
"""Two texts that end in different tokens: a template's ending is all that it writes after both of them."""
ROLES = ("system", "query", "document")
"""The roles of the messages that a chat template gets for a pair. The system's is the instruction."""


def rerank_documents(
    llm: Any, query: str, documents: Sequence[str], instruction: str | None, show: bool
) -> list[Ranking]:
    """Order documents by how well they answer a query: see `LLM.rerank`."""
    llm.engine.claim.check()
    if not isinstance(query, str):
        raise refuse(query, "query", "a string")
    documents = read_column(documents, "documents")
    is_list = isinstance(documents, Sequence) and not isinstance(documents, str)
    if not is_list or not all(isinstance(document, str) for document in documents):
        raise refuse(documents, "documents", "a list of strings")
    requests = prepare_pairs(llm, [query] * len(documents), documents, instruction)
    outputs = dict(llm.run_requests(requests, "Scoring", show))
    scores = read_relevances(llm, [outputs[i] for i in range(len(outputs))])
    return rank_documents(scores, documents)


def rank_documents(scores: Sequence[float], documents: Sequence[str]) -> list[Ranking]:
    """Return the documents in the order of their scores, the highest first."""
    ranked = [Ranking(index=i, relevance_score=score, document=documents[i]) for i, score in enumerate(scores)]
    return sorted(ranked, key=lambda one: -one["relevance_score"])


def prepare_pairs(
    llm: Any, queries: Sequence[str], documents: Sequence[str], instruction: str | None
) -> "list[Request]":
    """Return the requests for the scores of pairs. `read_relevances` reads their outputs.

    Args:
        queries: one for each document.
        instruction: see `LLM.rerank`.

    Raises:
        ValueError: the model is no reranker, or a pair is too long. The message has the number of the pair.
    """
    if not isinstance(instruction, str | None):
        raise refuse(instruction, "instruction", "a string")
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"rerank needs a tokenizer, and {quote(llm.engine.config.model)} has none")
    pooling: Pooling = llm.engine.facts.pooling
    files = read_pair_files(llm.engine.facts.origin)
    given = files.instruction if instruction is None else instruction
    if isinstance(pooling, Head) and len(pooling.labels) != 1:
        raise ValueError(f"the model's head has {len(pooling.labels)} labels; a reranker's has one")
    if not documents:
        return []
    answers = None if files.answers is None else [[token] for token in files.answers]
    if not isinstance(pooling, Head) and answers is None:
        answers = find_answers(llm, tokenizer)
        prompts = fill_template(llm, tokenizer, queries, documents, instruction or INSTRUCTION)
    elif files.has_template or (files.has_template is None and tokenizer.template_tokenizer.chat_template is not None):
        prompts = render_pairs(llm, tokenizer, queries, documents, given, files)
    else:
        prompts = join_pairs(llm, tokenizer, queries, documents, given, files.max_tokens)
    if isinstance(pooling, Head):
        return prepare_texts(llm, prompts, kind="pair")
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, prompt_logprob_start=len(prompt))
        # The requests of one pair stand side by side, so that they share its keys and values.
        with name_errors("pair", i, len(prompts)):
            requests += [llm.prepare([*prompt, *answer], params) for answer in answers or ()]
    return requests


def join_pairs(
    llm: Any,
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str,
    max_tokens: int | None,
) -> list[list[int]]:
    """Return the tokens of each pair, which the tokenizer joins, as CrossEncoder does without a chat template.

    Of a pair that is longer than max_tokens the longer text is cut until both are equally long, and then both.
    """
    starts = [instruction + query for query in queries]
    for i, pair in enumerate(zip(starts, documents, strict=True)):
        with name_errors("pair", i, len(documents)):
            tokenizer.check("".join(pair))
    cut = {} if max_tokens is None else {"truncation": "longest_first", "max_length": max_tokens}
    pairs: list[list[int]] = llm.get_tokenizer()(starts, list(documents), **cut)["input_ids"]
    return pairs


def render_pairs(
    llm: Any,
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str,
    files: PairFiles,
) -> list[list[int]]:
    """Return the tokens of each pair, which the folder's chat template writes, as CrossEncoder does with one.

    Query and document are messages with these roles, after a system's message with the instruction. Of a pair that is
    longer than the limit the last tokens are left out, but what the template writes after the texts takes the place of
    the last ones that stay.

    Raises:
        ValueError: there is no template, or it leaves one of them out.
    """
    from nanovllm.features.conversations import ChatTemplate

    if tokenizer.template_tokenizer.chat_template is None:
        raise ValueError(
            f"{quote(llm.engine.config.model)} has no chat template, and modality_config in its "
            'sentence_bert_config.json names "message", for which a template writes the pair'
        )
    template = ChatTemplate(tokenizer, {"add_generation_prompt": False, **files.options})

    def render(*contents: str) -> str:
        named = zip(ROLES, contents, strict=True)
        messages = [{"role": role, "content": content} for role, content in named if role != "system" or content]
        try:
            return template.render(messages)
        except Exception as error:  # an error of jinja2, or any error in the template's code
            raise ValueError(f"the chat template refuses a query and a document: {error}") from error

    plain = ("alpha" if instruction else "", "bravo", "charlie")
    for i in range(len(ROLES)):
        changed = ["delta " + content if i == j else content for j, content in enumerate(plain)]
        if plain[i] and render(*plain) == render(*changed):
            raise ValueError(
                f"the chat template of {quote(llm.engine.config.model)} leaves out the role {ROLES[i]!r}. A pair has "
                f"the roles {', '.join(ROLES)}, as in sentence-transformers: give the folder the template of a "
                "reranker, or none, which joins the two texts"
            )
    texts = [render(instruction, query, document) for query, document in zip(queries, documents, strict=True)]
    pairs = tokenise_pairs(llm, tokenizer, texts)
    most = files.max_tokens
    if most is None or max(map(len, pairs)) < most:
        return pairs
    ending: list[int] = []
    if files.keeps_ending:
        ending = find_common_ending(*tokenise_pairs(llm, tokenizer, [render(instruction, *2 * [w]) for w in FILLERS]))
    starts_late = tokenizer.template_tokenizer.truncation_side == "left"
    cut = [pair[-most:] if starts_late else pair[:most] for pair in pairs]
    kept = min(len(ending), most)
    return [pair if len(pair) < most else pair[: most - kept] + ending[len(ending) - kept :] for pair in cut]


def find_common_ending(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the tokens with which both texts end; none if one text is nothing else."""
    count = 0
    for left, right in zip(reversed(first), reversed(second), strict=False):
        if left != right:
            break
        count += 1
    return list(first[len(first) - count :]) if count < min(len(first), len(second)) else []


def find_answers(llm: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of "yes" and "no". ValueError if the model does not have those of Qwen3-Reranker's template."""
    tokens = tokenizer.encode_batch([*ANSWERS, *OF_TEMPLATE], add_special_tokens=False)
    if any(len(token_ids) != 1 for token_ids in tokens[len(ANSWERS) :]):
        raise ValueError(
            f"{quote(llm.engine.config.model)} is no reranker: rerank needs a model with a head, or one with the "
            f"tokens {' and '.join(OF_TEMPLATE)}, as Qwen3-Reranker has them"
        )
    return tokens[: len(ANSWERS)]


def fill_template(
    llm: Any, tokenizer: Tokenizer, queries: Sequence[str], documents: Sequence[str], instruction: str
) -> list[list[int]]:
    """Return the tokens of each pair, as Qwen3-Reranker is asked."""
    pairs = zip(queries, documents, strict=True)
    texts = [TEMPLATE.format(instruction=instruction, query=query, document=document) for query, document in pairs]
    return tokenise_pairs(llm, tokenizer, texts)


def tokenise_pairs(llm: Any, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts that a template wrote."""
    origin = llm.engine.facts.origin
    tokenised = tokenise_prompts(texts, tokenizer, kind="pair", add_special_tokens=False, origin=origin)
    return [prompt.token_ids for prompt in tokenised]


def read_relevances(llm: Any, outputs: Sequence[Output], is_raw: bool = False) -> list[float]:
    """Return the score of each pair from the outputs of its requests.

    Args:
        is_raw: return what no activation has made a probability: of two answers, the difference of their logits.

    Raises:
        RuntimeError: an output is an error.
    """
    pooling: Pooling = llm.engine.facts.pooling
    if isinstance(pooling, Head):
        found = [read_classification(output, pooling) for output in outputs]
        return [float((one.scores if is_raw else one.probs)[0]) for one in found]
    is_raw = is_raw or read_pair_files(llm.engine.facts.origin).activation == "none"
    logprobs = [read_score(output)["logprob"] for output in outputs]
    raw = np.array(logprobs[::2]) - np.array(logprobs[1::2])
    scores: list[float] = (raw if is_raw else np.exp(-np.logaddexp(0, -raw))).tolist()
    return scores
