"""Help for tests of batch jobs: lines, an engine that answers at once, and jobs over it."""

import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from nanovllm import SamplingParams
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.run import run_job
from nanovllm.config import EngineConfig
from nanovllm.engine.sequence import Request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def openai_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return ask(CHAT if "messages" in body else COMPLETIONS, custom_id, **body)


def ask(url: str, custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A file of lines: bytes as they are, other things as JSON."""
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def texts_by_id(path: Path) -> dict[str, str]:
    """The text of every result, by custom_id, or by the number of a plain line; fails if an id is there twice."""
    texts: dict[str, str] = {}
    for answer in read_answers(path):
        if answer["error"] is None:
            key = answer["custom_id"] or answer["id"].removeprefix("batch_req_")
            assert key not in texts
            choice = answer["response"]["body"]["choices"][0]
            texts[key] = choice["message"]["content"] if "message" in choice else choice["text"]
    return texts


class InstantLLM:
    """Stands in for LLM: a prompt's answer is told by the prompt and the seed, and answers come in any order.

    With `dies_after`, it raises `error` instead of the answer after so many.
    """

    def __init__(
        self,
        config: EngineConfig,
        dies_after: int | None = None,
        error: BaseException | None = None,
        origin: str = "a digest",
    ) -> None:
        self.max_model_len = config.max_model_len or 4096
        self.dies_after = dies_after
        self.error = error
        facts = {"seed": config.seed, "dtype": "float32", "device": "cpu", "attention_backend": "torch"}
        facts |= {"lora": config.lora, "quantization": config.quantization, "tokenizer": config.tokenizer}
        facts |= {"max_model_len": self.max_model_len, "usual_length": self.max_model_len}
        facts |= {"block_size": 16, "max_num_seqs": 4}
        facts |= {"enable_prefix_caching": True, "data_parallel_size": 1}
        scheduler = SimpleNamespace(block_manager=SimpleNamespace(num_blocks=64))
        self.engine = SimpleNamespace(
            config=SimpleNamespace(**facts),
            facts=SimpleNamespace(origin=origin, stamps=()),
            scheduler=scheduler,
            observers=[],
        )
        self.tokenizer = SimpleNamespace(apply_chat_template=lambda chat_template: None)
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.is_closed = False

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def prepare(self, prompt: str | list[int], params: SamplingParams) -> Request:
        token_ids = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
        if not 0 < len(token_ids) < self.max_model_len:
            raise ValueError(f"the prompt has {len(token_ids)} tokens")
        return Request(array("i", token_ids), params, None, None, self.engine)

    def render_chat(self, messages: list[dict[str, str]], kwargs: dict[str, Any] | None) -> str:
        from nanovllm.features.conversations import read_conversation

        read = read_conversation(messages)
        contents = [
            m["content"] if isinstance(m["content"], str) else "\n".join(part["text"] for part in m["content"])
            for m in read
        ]
        texts = [f"<{m['role']}>{content}" for m, content in zip(read, contents, strict=True)]
        return "".join(texts) + (str(kwargs) if kwargs else "")

    def run_requests(self, requests: Iterable[Request]) -> Iterator[tuple[int, dict[str, Any]]]:
        order = random.Random(0)
        window = []
        incoming = enumerate(requests)
        num_answers = 0
        while True:
            while len(window) < 8 and (item := next(incoming, None)) is not None:
                self.requests.append((item[1].prompt_token_ids.tolist(), item[1].params))
                window.append(item)
            if not window:
                return
            index, request = window.pop(order.randrange(len(window)))
            if num_answers == self.dies_after:
                raise self.error or RuntimeError("the engine died")
            num_answers += 1
            yield index, self._answer(request.prompt_token_ids.tolist(), request.params)

    def _answer(self, token_ids: list[int], params: SamplingParams) -> dict[str, Any]:
        text = f"{len(token_ids)} tokens, seed {params.seed}"
        out = [ord(c) for c in text]
        return {
            "text": text,
            "token_ids": out,
            "finish_reason": "stop",
            "prompt_token_ids": token_ids,
            "num_cached_tokens": 1,
            "logprobs": [{i: -0.5, i + 1: float("-inf"), i + 2: -0.1} for i in out],
        }

    def stats(self) -> dict[str, int]:
        names = ("prompt", "cached", "generated", "draft", "accepted")
        return {f"num_{name}_tokens": 0 for name in names}

    def close(self) -> None:
        self.is_closed = True


def run(source: Path | str, results: Path | str, llm: dict[str, Any] | None = None, **options: Any) -> Status:
    """A job over an InstantLLM, as the command runs it; options are EngineConfig's, or Job's."""
    of_job = {field.name: options.pop(field.name) for field in fields(Job) if field.name in options}
    config = EngineConfig("some-model", max_model_len=1000, **options)
    job = Job(str(source), str(results), config, **{"model_name": "some-model", **of_job})
    with patch("nanovllm.apps.jobs.run.load_llm", lambda config: InstantLLM(config, **(llm or {}))):
        return run_job(job)


def run_job_that_calls(change: Callable[[], None], source: Path, out: Path, after: int = 10) -> Status:
    """Run a job over an engine that calls a function after some answers."""

    class Changing(InstantLLM):
        def run_requests(self, requests: Any) -> Iterator[Any]:
            for count, answer in enumerate(super().run_requests(requests)):
                if count == after:
                    change()
                yield answer

    config = EngineConfig("some-model", max_model_len=1000)
    with patch("nanovllm.apps.jobs.run.load_llm", Changing):
        return run_job(Job(str(source), str(out), config, "some-model"))
