"""Checks the answer to a chapter's exercise: python -m docs.guide.exercises CHAPTER ANSWER...

It stores no answers: it runs the engine and compares. The exit status is 0 if the answer is right.
"""

import argparse
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler

SMALL: dict[str, Any] = {"model": "tiny-qwen3", "dtype": "float32", "max_model_len": 256}
GREEDY = SamplingParams(temperature=0)


class Watch:
    """Notes of each step which sequences run, in order of admission, and the length of the longest block table."""

    def __init__(self, llm: LLM) -> None:
        self.admitted: list[int] = []
        self.most_blocks = 0
        self._scheduler = llm.engine.scheduler
        llm.observe(self)

    def planned(self, *_: object) -> None:
        for seq in self._scheduler.running:
            self.most_blocks = max(self.most_blocks, len(seq.block_table))
            if seq.seq_id not in self.admitted:
                self.admitted.append(seq.seq_id)

    def finished(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def ask(llm: LLM, *questions: str) -> list[Any]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    return llm.chat(chats, GREEDY, use_tqdm=False)


def count_rows() -> str:
    """Chapter 0: how many tokens go through the layers, without a cache and with one."""
    from docs.guide import from_nothing

    forward = from_nothing.forward
    counts = []

    def count(token_ids: list[int], cache: dict[str, Any]) -> Any:
        counts[-1] += len(token_ids)
        return forward(token_ids, cache)

    from_nothing.forward = count
    try:
        for generate in (from_nothing.generate_without_cache, from_nothing.generate):
            counts.append(0)
            generate(from_nothing.TOKENIZER.encode("1 2 3").ids, 12)
    finally:
        from_nothing.forward = forward
    return " ".join(map(str, counts))


def count_steps() -> str:
    """Chapter 1: the steps of three chats in one call."""
    with LLM(**SMALL) as llm:
        ask(llm, "what is the capital of Japan?", "what is 3 plus 4?", "what is the capital of France?")
        return str(llm.stats()["num_steps"])


def find_layer() -> str:
    """Chapter 2: the first layer from which on the model's guess stays what it says in the end."""
    from docs.guide import from_nothing as engine

    prompt = "<|im_start|>user\nwhat is 2 plus 6?<|im_end|>\n<|im_start|>assistant\n"
    token_ids = engine.TOKENIZER.encode(prompt).ids
    guesses = []
    num_layers = engine.NUM_LAYERS
    try:
        for engine.NUM_LAYERS in range(1, num_layers + 1):
            guesses.append(int(engine.forward(token_ids, {}).argmax()))
    finally:
        engine.NUM_LAYERS = num_layers
    return str(next(i + 1 for i in range(num_layers) if len(set(guesses[i:])) == 1))


def find_balance() -> str:
    """Chapter 3: the smallest number of requests whose keys and values are more bytes than the weights."""
    import torch

    from nanovllm.features.shapes import preset_config
    from nanovllm.models.model_config import load_model_config
    from nanovllm.models.sizes import Sizes

    sizes = Sizes(load_model_config(preset_config("qwen3-0.6b"), "qwen3-0.6b"))
    return str(2 * sizes.num_parameters // (500 * sizes.kv_bytes(torch.bfloat16)) + 1)


def count_blocks() -> str:
    """Chapter 4: the blocks of a request, and the slots of the last one that stay empty."""
    with LLM(kvcache_block_size=16, **SMALL) as llm:
        watch = Watch(llm)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        llm.generate({"prompt_token_ids": [5] * 100}, params, use_tqdm=False)
    num_computed = 100 + 60 - 1
    return f"{watch.most_blocks} {16 * watch.most_blocks - num_computed}"


def count_cached() -> str:
    """Chapter 5: the tokens that the second question finds in blocks of 32, and in blocks of 64."""
    rules = {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence, and be kind. "}
    found = []
    for block_size in (32, 64):
        with LLM(kvcache_block_size=block_size, **SMALL) as llm:
            for question in ("what is 1 plus 2?", "what is 3 plus 4?"):
                output = llm.chat([rules, {"role": "user", "content": question}], GREEDY, use_tqdm=False)[0]
        found.append(str(output["num_cached_tokens"]))
    return " ".join(found)


@contextmanager
def shortest_first() -> Iterator[None]:
    """Make every scheduler admit the shortest waiting sequence first: the change that chapter 6 asks for."""
    admit = Scheduler._admit

    def admit_shortest(self: Scheduler, rows: Any, ends: Any) -> Any:
        self.waiting = deque(sorted(self.waiting, key=lambda seq: len(seq.token_ids)))
        return admit(self, rows, ends)

    Scheduler._admit = admit_shortest  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler._admit = admit  # type: ignore[method-assign]


def find_broken_promise() -> str:
    """Chapter 6: which promise breaks if the scheduler admits the shortest sequence first.

    The reader's own change may still be in the scheduler, so nothing is compared with the scheduler as it is.
    """
    prompts = ["tell me a story about a fox and a friend who", "1 2 3", "count from 1 to 9", "tell me a story"]

    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(**SMALL) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0]["token_ids"] for prompt in prompts]
    with shortest_first(), LLM(max_num_seqs=1, order="given", **SMALL) as llm:
        watch = Watch(llm)
        together = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.stats()
    promises = {
        "tokens": together == alone,
        "order": watch.admitted == sorted(watch.admitted),
        "blocks": stats["num_free_blocks"] == stats["num_blocks"],
    }
    return " ".join(name for name, is_kept in promises.items() if not is_kept)


def draw_hot() -> str:
    """Chapter 7: the first token that seed 42 draws at temperature 2."""
    with LLM(**SMALL) as llm:
        params = SamplingParams(temperature=2, seed=42, max_tokens=1)
        return str(llm.generate("tell me a story about", params, use_tqdm=False)[0]["text"])


def count_sums() -> str:
    """Chapter 8: the bytes of the sums of a step that computes a prompt of 100 tokens."""
    with LLM(**SMALL) as llm:
        model: Any = llm.engine.runner.model  # type: ignore[attr-defined]
        return str(100 * 2 * len(model.layers) * model.norm.numel() * 4)


def count_two_waves() -> str:
    """Chapter 9: the steps of 16 requests of 32 tokens, 8 at a time."""
    with LLM(max_num_seqs=8, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        llm.generate([f"count from {i} to 20" for i in range(16)], params, use_tqdm=False)
        return str(llm.stats()["num_steps"])


def replay(text: list[int], output: list[int], num_drafts: int) -> Iterator[int]:
    """Yield how many drafts are right in each pass that generates an output after a text.

    The drafts are the tokens that followed when the last two tokens occurred before.
    """
    at = 0
    while at < len(output):
        known = text + output[:at]
        places = (i for i in range(len(known) - 3, -1, -1) if known[i : i + 2] == known[-2:])
        start = next(places, len(known)) + 2
        right = 0
        for draft, token in zip(known[start : start + num_drafts], output[at:], strict=False):
            if draft != token:
                break
            right += 1
        yield right
        at += right + 1


def tell_story() -> tuple[list[int], list[int]]:
    """Return the prompt and the output of chapter 10's story, as token ids."""
    with LLM(**SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        output = llm.chat([{"role": "user", "content": "tell me a story about a fox"}], params, use_tqdm=False)[0]
    return list(output["prompt_token_ids"]), list(output["token_ids"])


def count_passes() -> str:
    """Chapter 10: the passes of a story that is told for the second time, with three drafts a pass."""
    prompt, output = tell_story()
    return str(len(list(replay(prompt + output + prompt, output, 3))))


EXERCISES: list[tuple[Callable[[], str], str]] = [
    (count_rows, "Without a cache, step i computes the prompt and the i tokens after it. With one, each token once."),
    (count_steps, "Requests share steps. So look for the one that needs the most."),
    (find_layer, "Use the listing of this chapter with the other question, and look for the last change."),
    (find_balance, "A request adds 500 times 114,688 bytes. The weights are 2 bytes for each parameter."),
    (count_blocks, "The last token is sampled, but nobody computes its keys and values."),
    (count_cached, "The prompts have 47 tokens. Only full blocks can be found."),
    (find_broken_promise, "Sampling depends on a request alone, and every block is given back. What is left?"),
    (draw_hot, "Divide the logits by 2, apply softmax, and walk along the strip to the same u."),
    (count_sums, "Two sums in each layer, 192 numbers of 4 bytes for each token."),
    (count_two_waves, "Eight requests run at a time, and all of them need equally many steps."),
    (count_passes, "Change the 6 of `start + 6` to 5, and paste the three blocks again."),
]
"""For each chapter: what finds the answer, and a hint for who was wrong."""


def split_answer(text: str) -> list[str]:
    """Return the words and numbers of an answer. Commas within numbers, case and punctuation do not matter."""
    return re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d)", "", text.lower()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", type=int, choices=range(len(EXERCISES)))
    parser.add_argument("answer", nargs="+")
    options = parser.parse_args(arguments)
    find, hint = EXERCISES[options.chapter]
    is_right = split_answer(" ".join(options.answer)) == split_answer(find())
    print("Right." if is_right else f"Not yet. {hint}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
