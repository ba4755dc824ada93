"""A model for EleutherAI's lm-evaluation-harness; importing this registers it there as "nanovllm":

import nanovllm.lm_eval
lm_eval.simple_evaluate(model="nanovllm", model_args="pretrained=Qwen/Qwen3-0.6B", tasks=["hellaswag"])
"""

import sys
from collections.abc import Sequence
from typing import Any

try:
    from lm_eval._cli import HarnessCLI
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("lm-evaluation-harness is not installed: pip install 'nano-vllm[eval]'") from error

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

Pair = tuple[Any, list[int], list[int]]
"""A key for the harness's cache, and the token ids of a context and its continuation."""


@register_model("nanovllm")
class NanoVLLM(TemplateLM):  # type: ignore[misc]  # where the harness is not installed, it has no types
    """An LLM as the harness asks for it. All requests of a task run at once, so there is no batch size."""

    def __init__(
        self,
        pretrained: str | LLM,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            pretrained: a model as LLM takes it, or an LLM.
            batch_size, max_batch_size: of the harness's command line; without effect.
            add_bos_token: put special tokens around contexts; None leaves it to the tokenizer.
            prefix_token_id: what an empty context is replaced by; None means the tokenizer's bos, or else eos.
            max_gen_toks: of tasks that set no limit.
            chat_template_args: for the chat template, as {"enable_thinking": False}.
            options: see `EngineConfig`.
        """
        super().__init__()
        if device is not None:
            options["device"] = device
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **options)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_length, self.max_gen_toks = self.llm.max_model_len, max_gen_toks
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self._chat_template_args = chat_template_args or {}

    # ---- text

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none."""
        given, bos = self._prefix_token_id, self.tokenizer.bos_token_id
        return next(token_id for token_id in (given, bos, self.eot_token_id) if token_id is not None)

    @property
    def tokenizer_name(self) -> str:
        """By which the harness keeps its cache of requests apart."""
        return self.tokenizer.name_or_path.replace("/", "__")  # type: ignore[no-any-return]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; a string that begins with the prefix token gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if string.startswith(self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)  # type: ignore[no-any-return]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_template_args,
        }
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)  # type: ignore[no-any-return]

    # ---- requests

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each continuation; contexts are cut from the left."""
        # Sorted by context, so that what contexts begin with in common is computed once.
        order = sorted(range(len(requests)), key=lambda i: (requests[i][1], requests[i][2]))
        contexts, endings = [], []
        for i in order:
            _, context, ending = requests[i]
            contexts.append((context + ending)[-(self.max_length + 1) : -len(ending)])
            endings.append(ending)
        found: dict[int, tuple[float, bool]] = {}
        for i, score in zip(order, self.llm.score(contexts, endings, not disable_tqdm), strict=True):
            found[i] = answer = score["logprob"], score["is_greedy"]
            if (key := requests[i][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of max_length that share no token to predict."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            tokens, before = self.tok_encode(request.args[0]), len(windows)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to its stop strings or limit; contexts are cut from the left."""
        eos = self.tokenizer.decode(self.eot_token_id)
        prompts, params, stops = [], [], []
        for request in requests:
            context, given = request.args
            fields = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            max_tokens, until = int(fields.pop("max_gen_toks")), handle_stop_sequences(fields.pop("until"), eos)
            fields.pop("do_sample")  # a temperature of 0 says it
            room = self.max_length - max_tokens
            if room < 1:
                raise ValueError(
                    f"a task generates up to {max_tokens} tokens; with max_model_len={self.max_length} that leaves no "
                    "room for its context: raise max_model_len, or set max_gen_toks in gen_kwargs"
                )
            prompts.append(self.tok_encode(context)[-room:])
            # The engine ends at the end of sequence by its id; special tokens are no part of the text.
            stop = [text for text in until if text and text != eos]
            params.append(SamplingParams(**{"temperature": 0.0, **fields}, max_tokens=max_tokens, stop=stop))
            stops.append(until)
        texts = []
        for request, output, until in zip(
            requests, self.llm.generate(prompts, params, not disable_tqdm), stops, strict=True
        ):
            texts.append(postprocess_generated_text(output.text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts


def run_harness(model: str, arguments: Sequence[str]) -> None:
    """The harness's own command `run`, with this model; its --device is cuda unless it is told otherwise."""
    own = ["run", "--model", "nanovllm", "--device", "auto", "--model_args", f"pretrained={model}"]
    sys.argv = ["nanovllm eval", *own, *arguments]
    harness = HarnessCLI()
    harness.execute(harness.parse_args())
