"""The facade: what a user of the library calls."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn, TypeVar, Unpack

from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.engine.hooks import StepObserver
from nanovllm.engine.request import Request, derive_seed
from nanovllm.load import load_engine
from nanovllm.outputs import Output
from nanovllm.pieces import pieces_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.score import Score, read_score, score_requests
from nanovllm.text.chat import (
    Message,
    conversation_prompts,
    rendering_arguments,
    split_conversations,
    template_variables,
)
from nanovllm.text.prompts import (
    Prompt,
    as_iterable,
    as_prompts,
    each,
    naming,
    one_each,
    tokenise_prompt,
    tokenise_texts,
)
from nanovllm.utils.ahead import work_ahead
from nanovllm.utils.checks import refuse
from nanovllm.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

T = TypeVar("T")

Item = Request | Prompt | tuple[Prompt, SamplingParams | None]
"""What `stream` takes: a prompt, bare or with its own sampling_params, or what `prepare` made of one."""


class LLM:
    """An engine with one model. Several may live in one process, side by side or one after another, each used by one
    thread at a time.

    >>> llm = LLM("tiny-qwen3")
    >>> llm.generate(["..."], SamplingParams(temperature=0))[0]["text"]
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        """
        Args:
            model: a local folder, a Hugging Face id, or "tiny-qwen3", the model in the box.
            options: see `EngineConfig`.

        Raises:
            TypeError: an option that does not exist, with the nearest one that does.
            ValueError: a value that is out of range or cannot be had here, or a model that cannot be loaded.
        """
        self.engine = load_engine(EngineConfig.from_options(model, options))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Complete every prompt; the outputs come in the order of the prompts.

        Args:
            prompts: strings, lists of token ids, or {"prompt": ...} / {"prompt_token_ids": ...}; one or a list.
            sampling_params: one for all or one each; None means the model's generation_config.

        Returns:
            An Output for each prompt: a dict of `text`, `token_ids`, `finish_reason`, `stop_reason`, `prompt`,
            `prompt_token_ids`, `num_cached_tokens`, and `logprobs`, `prompt_logprobs` if asked, which also answers as
            vLLM's objects do. With n > 1 they are the first completion's, and `outputs` is the list of all.

        Raises:
            ValueError: a bad prompt, naming which; then none of them has run.
        """
        self.engine.check_idle()
        prompts = as_prompts(prompts)
        params = one_each(sampling_params, len(prompts))
        prompts = tokenise_texts(prompts, self.engine.tokenizer, self.max_model_len, use_tqdm)
        requests = each("prompt", list(zip(prompts, params, strict=True)), lambda pair: self.prepare(*pair))
        outputs = self._run_all(requests, "Generating", lambda output: output, use_tqdm)
        if errors := [output.error for output in outputs if output.error is not None]:
            logger.warning("%d of %d requests ended with an error; the first: %s", len(errors), len(outputs), errors[0])
        return outputs

    def _run_all(self, requests: Seq[Request], what: str, read: Callable[[Output], T], use_tqdm: bool) -> list[T]:
        """What `read` makes of the output of each request, in their order."""
        results: dict[int, T] = {}
        with ProgressBar(self.stats, total=len(requests), desc=what, unit="prompt", disable=not use_tqdm) as bar:
            self.engine.observers.append(bar)
            try:
                for i, output in self._run(requests):
                    results[i] = read(output)
                    bar.update()
            finally:
                # Not `remove`: tqdm's == fails on what is no progress bar.
                self.engine.observers[:] = [one for one in self.engine.observers if one is not bar]
        return [results[i] for i in range(len(requests))]

    def score(
        self, prompts: Prompt | Seq[Prompt], continuations: Prompt | Seq[Prompt], use_tqdm: bool = True
    ) -> list[Score]:
        """How likely each continuation is after its prompt, by the raw distribution.

        Args:
            prompts, continuations: as for `generate`, one each. Together they may have max_model_len + 1 tokens. Equal
                prompts are computed once if they follow each other: what they share in whole blocks of the KV cache.

        Returns:
            For each pair the continuation's `logprobs`, a token each, their sum `logprob`, its `token_ids`, and
            `is_greedy`: whether greedy decoding would give it.

        Raises:
            ValueError: a bad pair, naming which; then none has run.
            RuntimeError: the model's logits are NaN or infinite, so that there is no score.
        """
        self.engine.check_idle()
        requests = score_requests(self.engine, as_prompts(prompts), as_prompts(continuations), use_tqdm)
        return self._run_all(requests, "Scoring", read_score, use_tqdm)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Answer conversations, each a list of {"role": ..., "content": ...}, through the model's chat template.

        Args:
            messages: one conversation or a list of them. A content is a string, or OpenAI's list of parts of text.
            chat_template: in place of the model's.
            add_generation_prompt: end the prompt where an answer begins.
            continue_final_message: let the model go on with the last message; needs add_generation_prompt=False.
            tools: JSON schemas of functions, for templates that describe them.
            chat_template_kwargs: for the template, as {"enable_thinking": False}.

        Raises:
            ValueError: a conversation that the template cannot take, naming which; then none has run.
        """
        self.engine.check_idle()
        options: dict[str, Any] = {"chat_template": chat_template, "tools": tools}
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        options |= template_variables(chat_template_kwargs)
        conversations = split_conversations(messages)
        prompts = conversation_prompts(conversations, self.engine.tokenizer, options, self.max_model_len, use_tqdm)
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Seq[Message], chat_template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt, as text and token ids, that `chat` makes of one conversation.

        Args:
            chat_template_kwargs: the template's, and `chat`'s own from chat_template on.
        """
        options = chat_template_kwargs or {}
        (prompt,) = conversation_prompts([messages], self.engine.tokenizer, options, self.max_model_len, False)
        return prompt

    @property
    def rendering_arguments(self) -> frozenset[str]:
        """Names in chat_template_kwargs that are for a program to choose, never for data: the rendering's own."""
        return rendering_arguments(self.tokenizer) if self.engine.tokenizer is not None else frozenset()

    def prepare(self, request: Item, sampling_params: SamplingParams | None = None) -> Request:
        """Tokenise and validate one request for `stream`, so that a bad one (ValueError) can be set aside.

        Args:
            sampling_params: for a prompt that brings none of its own.
        """
        if isinstance(request, Request):
            if request.engine is not self.engine.identity:
                raise ValueError("the request was prepared by another engine: prepare it with the one that runs it")
            return request
        if isinstance(request, tuple) and len(request) == 2 and isinstance(request[1], SamplingParams | None):
            request, own = request
            sampling_params = own or sampling_params
        text, token_ids = tokenise_prompt(request, self.engine.tokenizer, self.max_model_len)
        return self.engine.prepare(token_ids, sampling_params, text)

    def stream(
        self, requests: Iterable[Item] | Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[int, Output]]:
        """Run requests from any iterable, taken lazily, and yield (index, output) as each request ends.

        At most 2 x max_num_seqs are held waiting, and as many again are tokenised while steps run, so an endless
        iterable runs in bounded memory. Leaving the iterator early aborts what is still running. For the text of one
        request as it comes, see `stream_tokens`.

        Args:
            requests: prompts in every form that `generate` takes, bare or as (prompt, sampling_params); or one.
            sampling_params: of the prompts that bring none; None means the model's generation_config.

        Raises:
            ValueError: a bad prompt, naming which; those before it that still run are aborted.
        """

        items, count = as_iterable(requests), 2 * self.engine.config.max_num_seqs

        def prepared() -> Iterator[Request]:
            preparing = work_ahead(items, lambda item: self.prepare(item, sampling_params), count)
            for i, (_, request) in enumerate(preparing):
                with naming("prompt", i):
                    ready = request.result()
                yield ready

        yield from self._run(prepared())

    def _run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Output]]:
        """As `stream`, of requests that are prepared."""
        with closing(self.engine.run(requests)) as run:
            for index, seq in run:
                yield index, self.engine.output(seq)

    def stream_tokens(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt, and yield its text piece by piece as it comes: together they are its `text`.

        A piece is held back while it may be half of a character or the beginning of a stop string.

        Raises:
            RuntimeError: the request ended with an error, after its text.
        """
        yield from pieces_of(self.engine, self.prepare(prompt, sampling_params))

    # ---- nano-vLLM's loop

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers made it; ValueError if the model has none."""
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer")
        return self.engine.tokenizer.transformers

    def get_tokenizer(self) -> Any:
        """`tokenizer`, as vLLM calls it."""
        return self.tokenizer

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request for `step`, and return the number that it is known by there."""
        self.engine.check_free()
        request = self.prepare(prompt, sampling_params)
        if request.params.n > 1:
            raise refuse(request.params.n, "n", "1 in this loop, which returns one completion a request")
        return self.engine.add(request).seq_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of the requests added.

        Returns:
            ([(number, token ids) of each request that ended], how many tokens the step computed: negative for a step
            of decodes alone; 0 if, with overlap, the step was launched and none is read yet).
        """
        self.engine.check_free()
        self.engine.last_read = None
        ended = [(seq.seq_id, seq.output_token_ids) for seq in self.engine.step()] if self.engine.has_work else []
        if (read := self.engine.last_read) is None:
            return ended, 0
        plan, lengths = read.plan, [seq.num_prompt_tokens for seq in read.seqs]
        are_decodes = plan.num_tokens == plan.num_sampled.sum() and (plan.num_computed >= lengths).all()
        return ended, -plan.num_tokens if are_decodes else plan.num_tokens

    def is_finished(self) -> bool:
        """Whether every request added has ended."""
        return not self.engine.has_work

    def exit(self) -> None:
        """`close`, as nano-vLLM calls it."""
        self.close()

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its output may have together."""
        return self.engine.config.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means: the model's generation_config."""
        return self.engine.default_params.clone()

    @cached_property
    def provenance(self) -> dict[str, str]:
        """What decides the tokens beside requests and options: the model's digest, versions, what "auto" became."""
        from nanovllm.provenance import read_provenance

        return read_provenance(self.engine.config, self.engine.origin)

    def derive_seed(self, name: str) -> int:
        """A seed for a request that is known by a name: the same in every run with the same engine seed."""
        return derive_seed(self.engine.config.seed, name)

    def token_text(self, token_id: int) -> str:
        """The text of one token, or "token_id:N" for a model without a tokenizer."""
        tokenizer = self.engine.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    def observe(self, observer: StepObserver) -> None:
        """Have an observer told of every step from now on; for measuring."""
        self.engine.observers.append(observer)

    def stats(self) -> dict[str, int]:
        """Cumulative counts: steps, tokens, cache hits, preemptions; and the blocks, free and in all."""
        return self.engine.stats()

    def close(self) -> None:
        """Free the model and the KV cache. The engine cannot be used afterwards."""
        self.engine.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled or copied: it holds weights, a KV cache and processes; make one where it is "
            "needed (in Ray's actors: nanovllm.ray.RayLLM)"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
