"""The facade: what a user of the library calls."""

import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from types import TracebackType
from typing import Any, Unpack

from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.engine.llm_engine import StepObserver
from nanovllm.engine.request import Prompt, Request, derive_seed
from nanovllm.load import load_engine
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import ProgressBar

Message = Mapping[str, Any]


class LLM:
    """An engine with one model. Several may live in one process, side by side or one after another.

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
            `prompt_token_ids`, `num_cached_tokens`, and `logprobs` if asked, which also answers as vLLM's objects do.

        Raises:
            ValueError: a bad prompt, naming which; then none of them has run.
        """
        if self.engine.closed:
            raise RuntimeError("the engine is closed")
        prompts = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: Seq[SamplingParams | None] = [sampling_params] * len(prompts)
        else:
            if isinstance(sampling_params, (str, Mapping)) or not isinstance(sampling_params, Iterable):
                raise ValueError(f"sampling_params is {sampling_params!r}; it must be a SamplingParams, or one each")
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one for all or one each")
        requests = []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.prepare(prompt, param))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from None
        outputs = [Output() for _ in requests]
        with ProgressBar(
            self.stats, total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm
        ) as bar:
            for i, output in self.stream(requests):
                outputs[i] = output
                bar.update()
        return outputs

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Answer conversations, each a list of {"role": ..., "content": ...}, through the model's chat template.

        Args:
            messages: one conversation or a list of them.
            chat_template_kwargs: for the template, as {"enable_thinking": False}.
        """
        if not messages or not isinstance(messages, (list, tuple)):
            raise ValueError(f"messages is {messages!r}; it must be a conversation or a list of conversations")
        conversations: Seq[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(conversation, chat_template_kwargs) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Seq[Message], chat_template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt, as text and token ids, that `chat` makes of one conversation."""
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer, so no chat template; use generate() with token ids")
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise ValueError(f'a conversation is {messages!r}; it must be a list of {{"role": ..., "content": ...}}')
        text = self.engine.tokenizer.render_chat(messages, chat_template_kwargs or {})
        return {"prompt": text, "prompt_token_ids": self.engine.tokenizer.encode(text, add_special_tokens=False)}

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Request:
        """Tokenise and validate one request for `stream`, so that a bad one (ValueError) can be set aside."""
        return self.engine.prepare(prompt, sampling_params)

    def stream(
        self, requests: Iterable[Request | tuple[Prompt, SamplingParams | None]]
    ) -> Iterator[tuple[int, Output]]:
        """Run requests from any iterable, taken lazily, and yield (index, output) as each finishes.

        At most 2 x max_num_seqs are held waiting, so an endless iterable runs in bounded memory. Leaving the
        iterator early aborts what is still running.
        """
        run = self.engine.run(r if isinstance(r, Request) else self.prepare(*r) for r in requests)
        with closing(run):
            for index, seq in run:
                yield index, self.engine.output(seq)

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its output may have together."""
        return self.engine.config.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means: the model's generation_config."""
        return self.engine.default_params

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

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or a list of prompts, as a list: a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts is None or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r}; it must be a string, a list of token ids, or a list of prompts")
    prompts = list(prompts)
    is_one = bool(prompts) and not any(isinstance(p, (str, Mapping, Iterable)) or p is None for p in prompts)
    return [prompts] if is_one else prompts
