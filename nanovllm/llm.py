"""`LLM`, the class that users call. It prepares requests, passes them to the engine, and returns outputs."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import cached_property
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.engine.claim import Activity, State
from nanovllm.engine.interfaces import StepObserver
from nanovllm.engine.order import Order
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.inputs import LoRARequest
from nanovllm.load import load_engine
from nanovllm.outputs import Classification, Embedding, Metric, Output, Ranking, Score, ScoreArrays, list_metrics
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Message, Prompt, list_conversations, list_prompts, name_errors, tokenise_prompts
from nanovllm.text.tokenizer import explain_no_tokenizer
from nanovllm.utils.checks import quote, refuse
from nanovllm.utils.progress import ProgressBar, hide_unless

if TYPE_CHECKING:
    from nanovllm.features.sharing import EngineThread

logger = logging.getLogger(__name__)

Item = Request | Prompt | tuple[Prompt, SamplingParams | None]
"""An item of `stream`: a prompt, a prompt with its own sampling_params, or a request that `prepare` returned."""


class LLM:
    """An engine with one model.

    A process may have several LLMs, at the same time or one after another. Only one thread at a time may use an LLM:
    other threads get a RuntimeError. But several threads may call `submit`, and any thread may call `close`.

    Examples:
        >>> [output] = LLM("tiny-qwen3").generate(["..."], SamplingParams(temperature=0))
        >>> output["text"]
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        """
        Args:
            model: a local folder, a Hugging Face id, or "tiny-qwen3", a small model that comes with this package.
            options: see `EngineConfig`.

        Raises:
            TypeError: an option does not exist. The message names a similar option, or else all options.
            ValueError: a value is out of range, this machine does not support it, or the model cannot be loaded.
            RuntimeError: this process was forked after torch had computed, and torch would hang in it.
        """
        self.engine = load_engine(EngineConfig.from_options(model, options))
        self._lock = RLock()  # reentrant, because a signal's handler may call `submit`
        self._thread: EngineThread | None = None
        """None until the first `submit`."""

    def __init_subclass__(cls) -> None:
        """Refuse a subclass with a `step` of its own: only the original nano-vLLM's `generate` calls this method."""
        if "step" in vars(cls):
            raise TypeError("generate does not call step(), so this method changes nothing; observe() sees each step")

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        prompt_token_ids: list[int] | Seq[list[int]] | None = None,
    ) -> list[Output]:
        """Complete every prompt, and return the outputs in the order of the prompts.

        Args:
            prompts: one prompt, a list of prompts, or a table (pandas, polars, pyarrow) with a column "prompt". A
                prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: a SamplingParams for all prompts, or a list with one per prompt. None means the model's
                generation_config.
            use_tqdm: draw progress bars.
            lora_request: the adapter of all prompts, or a list with one adapter, or None, per prompt. Prompts with the
                same adapter run together: docs/new-weights.md tells what a change of adapters costs.
            prompt_token_ids: prompts as token ids, in place of `prompts`: the name that older scripts use.

        Returns:
            An Output for each prompt: a dict with `text`, `token_ids`, `finish_reason`, `stop_reason`, `prompt`,
            `prompt_token_ids`, `num_cached_tokens`, and `logprobs` and `prompt_logprobs` if they were asked for. An
            Output has the attributes of vLLM's objects, too. With n > 1 the values are those of the first completion,
            and `outputs` lists all completions.

        Raises:
            ValueError: a prompt is not valid; no prompt has run. If there are several prompts, the message has the
                number of the bad one.
        """
        # One activity at a time uses the engine: a run, the loop of `step`, a load of weights, or sleep. The claim
        # knows which one. This raises an error if another activity uses the engine now.
        self.engine.claim.check()
        if prompt_token_ids is not None:
            if prompts is not None:
                raise ValueError("generate has prompts and prompt_token_ids: give one of them")
            prompts = prompt_token_ids
        requests = self.prepare_requests(list_prompts(prompts), sampling_params, show=use_tqdm)
        return _list_outputs(dict(self.run_requests(requests, "Generating", use_tqdm, lora_request)))

    def prepare_requests(
        self,
        prompts: Seq[Any],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None,
        *,
        kind: str = "prompt",
        add_special_tokens: bool = True,
        show: bool = False,
    ) -> list[Request]:
        """Turn prompts into requests: read, tokenise and validate them. Every list of prompts goes this way.

        Args:
            sampling_params: a SamplingParams for all prompts, or a list with one per prompt.
            kind: what error messages call a prompt.
            add_special_tokens: put the tokenizer's special tokens around each text.
            show: draw a progress bar if tokenising takes longer than a second.
        """
        count = len(prompts)
        params = _list_params(sampling_params, count)
        default_prompt = self.engine.facts.pooling.prompt  # for each text that is embedded; "" in most models
        if default_prompt:
            from nanovllm.features.scoring.embedding import add_default_prompt

            prompts = add_default_prompt(prompts, params, default_prompt)
        tokenised = tokenise_prompts(
            prompts,
            self.engine.tokenizer,
            kind=kind,
            add_special_tokens=add_special_tokens,
            show=show,
            origin=self.engine.facts.origin,
        )
        requests = []
        for i, (text, token_ids) in enumerate(tokenised):
            with name_errors(kind, i, count):
                requests.append(self.engine.prepare(token_ids, params[i], text))
        return requests

    def run_requests(
        self,
        requests: Iterable[Request | None],
        label: str = "",
        show: bool = False,
        lora_request: Any = None,
        make_output: Callable[[Sequence], Any] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Run requests. When a request ends, yield (number, output); the first request has number 0.

        Args:
            label: the word before the progress bar.
            show: draw the progress bar.
            lora_request: see `generate`. Only a list of requests may have it.
            make_output: makes something else than an Output of a request's first sequence.
        """
        make_output = make_output or self.engine.make_output
        total = len(requests) if isinstance(requests, list) else None
        order = self._plan_order(requests, lora_request)
        with (
            ProgressBar(self.stats, total=total, desc=label, unit="prompt", **hide_unless(show)) as bar,
            closing(self.engine.run(order, order.activity)) as run,
        ):
            self.engine.observers.append(bar)
            try:
                for ended in run:
                    for seq in ended:
                        bar.update()
                        number = order.take_number(seq)
                        output = make_output(seq)
                        if lora_request is not None:
                            has_one_each = isinstance(lora_request, list | tuple)
                            output.lora_request = lora_request[number] if has_one_each else lora_request
                        yield number, output
            finally:
                self.engine.observers.remove(bar)

    def _plan_order(self, requests: Iterable[Request | None], lora_request: Any) -> Order:
        """Return the order of the requests of one run. Only a list can have another order than the given one.

        The order hands the requests to the engine, and knows the number of each in the caller's list.
        """
        if isinstance(requests, list) and lora_request is not None:
            from nanovllm.features.adapters.groups import group_requests

            return group_requests(self, requests, lora_request)
        if isinstance(requests, list) and len(requests) > 1 and self.engine.config.order == "auto":
            from nanovllm.engine.admission import SoonestOrder

            return SoonestOrder(self.engine, requests)
        return Order(self.engine, requests)

    def score(
        self,
        prompts: Prompt | Seq[Prompt],
        continuations: Prompt | Seq[Prompt],
        use_tqdm: bool = True,
    ) -> list[Score]:
        """Compute how likely each continuation is after its prompt.

        The probabilities are the model's own, before temperature and filters.

        Args:
            prompts: one prompt or a list, in every form that `generate` takes. With order="given", put prompts with
                the same beginning next to each other: then their common blocks are computed only once.
            continuations: one per prompt, or several for one prompt. A prompt and its continuation together may have at
                most max_model_len + 1 tokens.

        Returns:
            A dict per pair. It has the continuation's `logprobs` (one per token), their sum `logprob`, the
            continuation's `token_ids`, and `is_greedy`: whether greedy decoding would give the continuation.

        Raises:
            ValueError: a pair is not valid; no pair has run. If there are several pairs, the message has the number of
                the bad one.
            RuntimeError: the model's logits are NaN or infinite, so there is no score.
        """
        from nanovllm.features.scoring.score import score_pairs

        return score_pairs(self, prompts, continuations, use_tqdm)

    def score_arrays(self, prompts: Prompt | Seq[Prompt], top: int = 64, use_tqdm: bool = True) -> list[ScoreArrays]:
        """Return what the model expects in the place of each token of a text: the `top` most likely tokens, as arrays.

        They are the numbers of `prompt_logprobs`, without a dict for each token. A smaller model can learn from them:
        docs/teach.md.

        Args:
            prompts: one prompt or a list, in every form that `generate` takes, with at most max_model_len + 1 tokens.
            top: from 1 to the size of the vocabulary.

        Raises:
            ValueError: a prompt or `top` is not valid; no prompt has run.
            RuntimeError: the model's logits are NaN or infinite.
        """
        from nanovllm.features.scoring.arrays import score_arrays

        return score_arrays(self, prompts, top, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[Embedding]:
        """Return the vector of each prompt: the hidden state of its last token, after the model's last norm.

        If the model's folder has the files of sentence-transformers, the vector is made as they say. What they may say
        is listed in docs/embeddings.md.

        Args:
            prompts: one prompt or a list of prompts, as in `generate`. A prompt may have max_model_len tokens. The
                tokenizer adds its special tokens, because some models need a special token at the end of a text.
            dimensions: cut each vector to this many elements; None keeps all elements, or as many as the folder says.
            normalize: divide each vector, after the cut, by its Euclidean length. False leaves that to the folder.

        Returns:
            An Embedding for each prompt: a dict with `embedding`, float32 [dimensions], `prompt_token_ids` and
            `num_cached_tokens`.

        Raises:
            ValueError: a prompt or `dimensions` is not valid, or the folder asks for vectors that cannot be made; no
                prompt has run.
            RuntimeError: the model's hidden states are NaN or infinite.
        """
        from nanovllm.features.scoring.embedding import embed_prompts

        return embed_prompts(self, prompts, dimensions=dimensions, normalize=normalize, show=use_tqdm)

    def classify(self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True) -> list[Classification]:
        """Return what the model's head says of each prompt: of a model called ...ForSequenceClassification.

        Args:
            prompts: as in `embed`. As in transformers, padding at the end of a prompt does not count.

        Returns:
            A Classification for each prompt: a dict with `probs` and `scores`, float32 [labels], `label`,
            `prompt_token_ids` and `num_cached_tokens`.

        Raises:
            ValueError: the model has no head, or a prompt is not valid; no prompt has run.
            RuntimeError: the model's hidden states are NaN or infinite.
        """
        from nanovllm.features.scoring.heads import classify_prompts

        return classify_prompts(self, prompts, show=use_tqdm)

    def reward(self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True) -> list[float]:
        """Return the score of each prompt by a head of one label, before any activation: see `classify`."""
        from nanovllm.features.scoring.heads import reward_prompts

        return reward_prompts(self, prompts, show=use_tqdm)

    def rerank(
        self, query: str, documents: Seq[str], instruction: str | None = None, use_tqdm: bool = True
    ) -> list[Ranking]:
        """Order documents by how well they answer a query, the best first.

        A model with a head of one label scores each pair of query and document, written as sentence-transformers'
        CrossEncoder writes it, and cut where the folder limits it. Any other model is asked as Qwen3-Reranker is, and
        the score is the probability of "yes" beside "no".

        Args:
            instruction: what the query asks for; None takes the text of Qwen3-Reranker's card. Of a model with a head,
                it is CrossEncoder's prompt; None takes the folder's, or none.

        Raises:
            ValueError: the model is no reranker.
        """
        from nanovllm.features.scoring.rerank import rerank_documents

        return rerank_documents(self, query, documents, instruction, show=use_tqdm)

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
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[Output]:
        """Answer conversations, each a list of {"role": ..., "content": ...}, through the model's chat template.

        Args:
            messages: one conversation, a list of conversations, or a table with a column "messages". A content is a
                string, or a list of text parts as in OpenAI's API.
            sampling_params: a SamplingParams for all conversations, or a list with one per conversation.
            chat_template: a Jinja template to use instead of the model's.
            add_generation_prompt: end the prompt with the template's opening of an answer, so that the model answers.
            continue_final_message: let the model continue the last message; needs add_generation_prompt=False.
            tools: JSON schemas of functions, for templates that describe them to the model.
            chat_template_kwargs: values of the template's variables, for example {"enable_thinking": False}.
            lora_request: as in `generate`, one for all conversations or one per conversation.

        Raises:
            ValueError: the template refuses a conversation; no conversation has run. If there are several
                conversations, the message has the number of the refused one.
        """
        from nanovllm.features.conversations import render_conversations

        self.engine.claim.check()
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise refuse(chat_template_kwargs, "chat_template_kwargs", "a dict of the template's variables, or None")
        options: dict[str, Any] = {"chat_template": chat_template, "tools": tools}
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        options |= chat_template_kwargs or {}
        conversations = list_conversations(messages)
        texts = render_conversations(conversations, self.engine.tokenizer, options, self.engine.facts.origin)
        requests = self.prepare_requests(
            texts, sampling_params, kind="conversation", add_special_tokens=False, show=use_tqdm
        )
        return _list_outputs(dict(self.run_requests(requests, "Generating", use_tqdm, lora_request)))

    def render_chat(self, messages: Seq[Message], chat_template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
        """Return the prompt that `chat` makes of one conversation, with its text and its token ids.

        Args:
            chat_template_kwargs: values of the template's variables. It may also hold these arguments of `chat`:
                chat_template, add_generation_prompt, continue_final_message, tools.
        """
        from nanovllm.features.conversations import render_conversations

        tokenizer = self.engine.tokenizer
        texts = render_conversations([messages], tokenizer, chat_template_kwargs or {}, self.engine.facts.origin)
        (prompt,) = tokenise_prompts(texts, tokenizer, add_special_tokens=False)
        return {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}

    def prepare(self, request: Item, sampling_params: SamplingParams | None = None) -> Request:
        """Tokenise and validate one request, for `stream` and others. An error is raised here, not there.

        Args:
            sampling_params: used if the request has no sampling_params.

        Raises:
            ValueError: the request is not valid.
        """
        if isinstance(request, Request):
            if request.engine is not self.engine.identity:
                raise ValueError("the request was prepared by another engine: prepare it with the engine that runs it")
            return request
        prompt: Any = request
        if isinstance(request, tuple) and len(request) == 2 and isinstance(request[1], SamplingParams | None):
            prompt = request[0]
            sampling_params = request[1] or sampling_params
        return self.prepare_requests([prompt], [sampling_params])[0]

    def stream(
        self, requests: Iterable[Item] | Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[int, Output]]:
        """Run requests from any iterable, and yield (index, output) as each request ends.

        The iterable is read lazily, so it may be endless. The engine takes a request while fewer than 2 x max_num_seqs
        sequences wait. A thread tokenises up to 2 x max_num_seqs further requests while steps run. If the caller leaves
        the iterator early, the requests that still run are aborted. `stream_tokens` yields the text of one request
        piece by piece.

        Args:
            requests: one prompt or many, in every form that `generate` takes. An item may also be a tuple
                (prompt, sampling_params), or a request that `prepare` returned.
            sampling_params: used for prompts that have no sampling_params. None means the model's generation_config.

        Raises:
            ValueError: a prompt is not valid. The message has the prompt's number. Earlier requests that still run are
                aborted.
        """
        from nanovllm.features.streaming import stream_outputs

        return stream_outputs(self, requests, sampling_params)

    def submit(self, prompt: Item, sampling_params: SamplingParams | None = None) -> "Future[Output]":
        """Queue one request and return at once. Several threads may call this at the same time.

        All submitted requests share the engine's steps. One extra thread runs these steps. While a submitted request
        runs, every other use of the engine is refused. An asyncio task waits with `await
        asyncio.wrap_future(llm.submit(prompt))`.

        Args:
            prompt: a prompt or a request, in every form that `prepare` takes. `render_chat` makes a conversation's
                prompt.
            sampling_params: used if `prompt` has no sampling_params.

        Returns:
            A future of the request's Output. If the engine fails, is closed or asleep, or belongs to another activity,
            the future raises the reason.

        Raises:
            ValueError: the request is not valid.
            RuntimeError: this process was forked after the engine was made, or the program ends.
        """
        from nanovllm.features.sharing import EngineThread

        request = self.prepare(prompt, sampling_params)
        self.engine.claim.check_process()  # in a forked process the lock might never be free
        with self._lock:
            if self._thread is None:
                self._thread = EngineThread(self.engine)
        return self._thread.submit(request)

    def stream_tokens(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt, and yield the text of its output piece by piece. All pieces joined are the whole `text`.

        The end of the text is held back while it may be an incomplete character. If there are stop strings, the last
        characters are held back, too, because they could be the beginning of a stop string.

        Raises:
            RuntimeError: the request ended with an error. The text before the error was yielded.
        """
        from nanovllm.features.streaming import stream_pieces

        return stream_pieces(self, prompt, sampling_params)

    # ---- the loop of the original nano-vLLM, with which this class is compatible: the caller calls step()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers made it; ValueError if the model has none."""
        if self.engine.tokenizer is None:
            raise ValueError(explain_no_tokenizer(self.engine.facts.origin))
        return self.engine.tokenizer.transformers

    def get_tokenizer(self) -> Any:
        """Return `tokenizer`. The method has vLLM's name."""
        return self.tokenizer

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request for `step`, and return a number. `step` returns the same number when the request ends."""
        self.engine.claim.check(also_in=(State.UNFINISHED,))
        request = self.prepare(prompt, sampling_params)
        if request.params.n > 1:
            raise refuse(request.params.n, "n", "1 in this loop, which returns one completion per request")
        with self.claim_loop("add_request()"):
            return self.engine.add(request).seq_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of the queued requests.

        Returns:
            ([(number, token ids) of each request that ended], count). One call may read the results of several
            steps. `count` is the number of tokens in the last of them. It is negative if that step only decoded. It is
            0 if this call read no result: at depth 2 (see `LLMEngine`) the first call only launches a step.
        """
        engine = self.engine
        with self.claim_loop("step()"):
            engine.last_read = None
            ended = engine.step() if engine.has_work else []
            read = engine.last_read
            outputs = [(seq.seq_id, seq.output_token_ids) for seq in ended]
            count = 0 if read is None else _count_tokens(read)
            return outputs, count

    @contextmanager
    def claim_loop(self, activity: str) -> Iterator[None]:
        """Claim the engine for one call of add_request() or step().

        Other activities are refused: during the call by the claim, and between calls by the state UNFINISHED.
        """
        claim = self.engine.claim
        with claim.held_by(Activity(activity), also_in=(State.UNFINISHED,)):
            try:
                with claim.work():
                    yield
            finally:
                claim.state = State.UNFINISHED if self.engine.has_work else State.READY

    def is_finished(self) -> bool:
        """Return whether all queued requests have ended."""
        return not self.engine.has_work

    def exit(self) -> None:
        """`close`, as the original nano-vLLM calls it."""
        self.close()

    @property
    def max_model_len(self) -> int:
        """A prompt and its output may have at most this many tokens together."""
        return self.engine.config.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `sampling_params=None` stands for: the model's generation_config.

        Raises:
            ValueError: that file asks for what this engine does not have.
        """
        return self.engine.facts.find_defaults().clone()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, or "token_id:N" if the model has no tokenizer."""
        tokenizer = self.engine.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode_token(token_id)

    def observe(self, observer: StepObserver) -> None:
        """Tell an observer about every step from now on. Benchmarks use this, for example."""
        self.engine.observe(observer)

    def stats(self) -> dict[str, int]:
        """Return cumulative counts of steps, tokens, drafts, cache hits and preemptions, and the numbers of blocks.

        Steps, cache hits and preemptions depend on the order in which requests ran: see the option `order`.
        """
        return self.engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Return the counts of `stats` as objects. The method and the objects have vLLM's names."""
        return list_metrics(self.stats())

    # ---- new weights, and sleep

    @cached_property
    def _renewal(self) -> Any:
        from nanovllm.features.renewal import Renewal

        return Renewal(self.engine)

    def load_weights(self, named_tensors: Iterable[tuple[str, Any]], finish: bool = True) -> None:
        """Replace weights, for example after a step of training. The prefix cache is forgotten.

        One call is one load, unless `finish` says otherwise. Each call checks all names and shapes before it writes. A
        load may replace only some layers. It must replace all parts of a fused matrix: q, k and v, or gate and up.

        Args:
            named_tensors: (name in a checkpoint, tensor of any floating dtype, on any device). The LM head of a tied
                model must equal the embedding. All pairs are read before the load begins. So if this is a generator,
                its code may use the engine, for example call `generate`.
            finish: False says that more calls follow. No request runs until the last of them has ended, or the whole
                model has come.

        Raises:
            ValueError: a name or a shape is wrong, or a tied model's head is not its embedding. Then this call has
                written nothing. Or the load is not complete. Then the engine is closed if something was written.
            RuntimeError: the engine is in use or asleep, or a rank has failed.
        """
        self._renewal.load_weights(named_tensors, finish)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the prefix cache, and return True. RuntimeError if requests are unfinished.

        Args:
            reset_running_requests: in the loop of `step`, preempt the requests that run. The next steps compute all
                their tokens again.
        """
        claim = self.engine.claim
        also_in = (State.UNFINISHED,) if reset_running_requests else ()
        with claim.held_by(Activity("reset_prefix_cache()"), also_in), claim.work():
            self.engine.scheduler.preempt_all()
            self.engine.scheduler.block_manager.forget_all()
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache (level 1), and the weights, too (level 2). Until `wake_up` no request runs.

        Raises:
            ValueError: the level is neither 1 nor 2.
            RuntimeError: requests are unfinished, or a rank has failed.
        """
        self._renewal.sleep(level)

    def wake_up(self, tags: Seq[str] | None = None) -> None:
        """Undo `sleep`. After level 2 the model's folder is read again.

        Args:
            tags: vLLM's: a list of "weights" and "kv_cache". The first call brings back everything, whatever it names,
                and a second one does nothing. So between two such calls the memory of the KV cache is taken already.

        Level 2 also frees weights that came from `load_weights`, and the folder does not have them. If you had loaded
        such weights, call `load_weights` again: until then no request runs.
        """
        self._renewal.wake_up(tags)

    def close(self) -> None:
        """Free the model and the KV cache. The engine cannot be used afterwards.

        If another thread runs a step, or a command such as sleep(), this waits until that has ended. It does not wait
        for unfinished requests. Whoever waits for a request that has not ended gets an error.
        """
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


def _count_tokens(step: ScheduledStep) -> int:
    """Return the number of tokens of a step; the negative number if the step only decoded.

    A decode gives a sample for each of its tokens. So does the last token of a prompt, which is no decode.
    """
    plan = step.plan
    if plan.num_tokens != plan.num_sampled.sum():
        return plan.num_tokens
    prompt_lengths = [seq.num_prompt_tokens for seq in step.seqs]  # `seqs` are those that sample: here all of the plan
    are_decodes = (plan.num_computed >= prompt_lengths).all()
    return -plan.num_tokens if are_decodes else plan.num_tokens


def _list_params(params: SamplingParams | Seq[SamplingParams | None] | None, count: int) -> list[SamplingParams | None]:
    """Return the sampling_params of each of `count` prompts.

    Raises:
        ValueError: `params` is neither one for all prompts nor one per prompt.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise ValueError(f"sampling_params is {quote(params)}; it must be a SamplingParams, or one per prompt")
    listed = list(params)
    if len(listed) != count:
        raise ValueError(f"{len(listed)} sampling_params for {count} prompts; give one for all, or one per prompt")
    return listed


def _list_outputs(outputs: Mapping[int, Output]) -> list[Output]:
    """Return the outputs in the order of their numbers. Warn if requests ended with an error."""
    listed = [outputs[i] for i in range(len(outputs))]
    if errors := [output.error for output in listed if output.error is not None]:
        logger.warning("%d of %d requests ended with an error; the first: %s", len(errors), len(listed), errors[0])
    return listed
