"""A model for EleutherAI's lm-evaluation-harness. Importing this module registers it there as "nanovllm":

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
    raise ImportError("lm-evaluation-harness is not installed: pip install lm_eval") from error

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

Pair = tuple[Any, list[int], list[int]]
"""(key of the harness's cache, token ids of a context, token ids of its continuation)."""


@register_model("nanovllm")
class NanoVLLM(TemplateLM):  # type: ignore[misc]  # where the harness is not installed, it has no types
    """Gives the harness the methods that it asks of a model. All requests of a task run at once."""

    def __init__(
        self,
        pretrained: str | LLM,
        batch_size: Any = None,
        max_batch_size: Any = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            pretrained: a model as LLM takes it, or an LLM.
            batch_size, max_batch_size: have no effect; the harness's command line passes them.
            add_bos_token: whether to add special tokens to contexts; None leaves that to the tokenizer.
            prefix_token_id: replaces an empty context; None means the tokenizer's bos, or else its eos.
            max_gen_toks: the limit of tokens for tasks that set none.
            chat_template_args: variables of the chat template, such as {"enable_thinking": False}.
            options: see `EngineConfig`.
        """
        super().__init__()
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **options)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_length = self.llm.max_model_len
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._chat_template_args = chat_template_args or {}

    # ---- text

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        choices = (self._prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id)
        return next(token_id for token_id in choices if token_id is not None)

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches tokenised requests."""
        return self.tokenizer.name_or_path.replace("/", "__")  # type: ignore[no-any-return]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids. A string that begins with the prefix token gets no second one."""
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
        prompt: Any = self.llm.render_chat(chat_history, options)
        return prompt["prompt"]  # type: ignore[no-any-return]

    # ---- requests

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy decoding gives it) of each continuation.

        A context that is too long is cut from the left.
        """
        # Sorting puts contexts with the same beginning one after another, so that the prefix cache has that beginning.
        order = sorted(range(len(requests)), key=lambda i: requests[i][1:])
        pairs = [requests[i][1:] for i in order]
        contexts = [(context + ending)[-(self.max_length + 1) : -len(ending)] for context, ending in pairs]
        endings = [ending for _, ending in pairs]
        results: dict[int, tuple[float, bool]] = {}
        for i, score in zip(order, self.llm.score(contexts, endings, not disable_tqdm), strict=True):
            results[i] = (score["logprob"], score["is_greedy"])
            if (key := requests[i][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[i])
        return [results[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text. Windows of max_length cover it; each token is scored once."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            before = len(windows)
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
        """Complete each context up to its stop strings or limit. A context that is too long is cut from the left."""
        eos = self.tokenizer.decode(self.eot_token_id)
        prompts = []
        params = []
        stops = []
        for request in requests:
            context, given = request.args
            fields = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            max_tokens = int(fields.pop("max_gen_toks"))
            until = handle_stop_sequences(fields.pop("until"), eos)
            fields.pop("do_sample")  # the harness also sets the temperature, to 0 for greedy decoding
            room = self.max_length - max_tokens
            if room < 1:
                raise ValueError(
                    f"a task generates up to {max_tokens} tokens; with max_model_len={self.max_length} that leaves no "
                    "room for its context: raise max_model_len, or set max_gen_toks in gen_kwargs"
                )
            prompts.append(self.tok_encode(context)[-room:])
            # The engine stops at the eos token by its id. It is no stop string, because text has no special tokens.
            stop = [text for text in until if text and text != eos]
            params.append(SamplingParams(**{"temperature": 0.0, **fields}, max_tokens=max_tokens, stop=stop))
            stops.append(until)
        texts = []
        outputs = self.llm.generate(prompts, params, not disable_tqdm)
        for request, output, until in zip(requests, outputs, stops, strict=True):
            texts.append(postprocess_generated_text(output.text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts


def run_harness(model: str, arguments: Sequence[str]) -> None:
    """Run the harness's command `run` with this model. Its own default of --device would be cuda, so "auto" is set."""
    own = ["run", "--model", "nanovllm", "--device", "auto", "--model_args", f"pretrained={model}"]
    sys.argv = ["nanovllm eval", *own, *arguments]
    harness = HarnessCLI()
    harness.execute(harness.parse_args())
