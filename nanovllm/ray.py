"""An engine as a stateful class for Ray Data, for anybody's pipeline:

import ray
from nanovllm import SamplingParams
from nanovllm.ray import RayLLM, actors
rows = [{"messages": [{"role": "user", "content": f"what is {n} + 17?"}]} for n in range(3, 103)]
outputs = ray.data.from_items(rows).map_batches(
    RayLLM,
    fn_constructor_args=("tiny-qwen3", SamplingParams(temperature=0.0)),
    batch_size=64,
    **actors(replicas=1),
)
for row in outputs.iter_rows():
    print(row["generated_text"], row["error"])
"""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

try:
    import ray
    from ray.data import ActorPoolStrategy
except ImportError as error:
    raise ImportError("Ray Data is not installed: pip install 'nano-vllm[ray]'") from error

from nanovllm.engine.sequence import Request
from nanovllm.llm import LLM
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import refuse

logger = logging.getLogger(__name__)

MAX_BATCHES = 64
"""Most batches that an actor works on at a time, each in a thread that only waits."""


def actors(
    replicas: int = 1, *, tensor_parallel_size: int = 1, on_gpu: bool = False, num_batches: int = 4
) -> dict[str, Any]:
    """The arguments of `map_batches` that make a pool of engines.

    Args:
        replicas: engines, each an actor.
        tensor_parallel_size: GPUs, or CPUs, of each.
        num_batches: how many an actor works on at a time, at most 64. Together they should hold some more rows than
            max_num_seqs, so that there is always a next one to run.
    """
    if not on_gpu and ray.is_initialized():
        num_cpus, needed = ray.cluster_resources().get("CPU", 0), replicas * tensor_parallel_size + 1
        if num_cpus < needed:
            logger.warning(
                f"the cluster has {num_cpus:g} CPUs; {replicas} engines and one for reading need {needed}, and Ray "
                f"would wait for ever to read: use fewer replicas, or ray.init(num_cpus={needed})"
            )
    num_batches = min(num_batches, MAX_BATCHES)
    pool = ActorPoolStrategy(
        size=replicas,
        max_tasks_in_flight_per_actor=num_batches,
        max_concurrent_calls_per_actor=num_batches,
        enable_true_multi_threading=True,
    )
    return {"compute": pool, "num_gpus" if on_gpu else "num_cpus": tensor_parallel_size}


class _Place(NamedTuple):
    """Where the answer to a request goes: its position there, and the queue that its thread waits at."""

    position: int
    answers: "SimpleQueue[tuple[int, Output] | BaseException]"


class SharedLLM(LLM):
    """An LLM whose `stream` may be open in many threads at a time: their requests run in the same steps.

    One thread runs the engine, and never ends; the others hand it requests and wait for answers. So a batch's last
    sequences run beside the next batch's first, and the KV cache stays full.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._incoming: SimpleQueue[tuple[Request, _Place]] = SimpleQueue()
        Thread(target=self._answer, name="engine", daemon=True).start()

    def _run(self, requests: Iterable[Request], label: str = "", show: bool = False) -> Iterator[tuple[int, Output]]:
        """Takes all requests at once. RuntimeError if the engine has stopped."""
        answers: SimpleQueue[tuple[int, Output] | BaseException] = SimpleQueue()
        num_requests = 0
        for request in requests:
            self._incoming.put((request, _Place(num_requests, answers)))
            num_requests += 1
        for _ in range(num_requests):
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise RuntimeError(f"the engine has stopped: {answer}") from answer
            yield answer

    def _answer(self) -> None:
        """Run all requests as they come, and give each answer to the thread that waits for it."""
        places: dict[int, _Place] = {}
        try:
            for ended in self.engine.run(self._requests(places)):
                for number, seq in ended:
                    place = places.pop(number)
                    place.answers.put((place.position, self.engine.output(seq)))
        except BaseException as error:
            for place in places.values():
                place.answers.put(error)
            while True:  # nobody may wait in vain
                self._incoming.get()[1].answers.put(error)

    def _requests(self, places: dict[int, _Place]) -> Iterator[Request | None]:
        """Yield the requests of all threads, and note by number who waits for each; None while there is none, unless
        nothing runs: then wait for the next."""
        for number in itertools.count():
            while places and self._incoming.empty():
                yield None
            request, places[number] = self._incoming.get()
            yield request


class RayLLM:
    """One engine, for `ray.data.Dataset.map_batches`. Batches of an actor overlap: see `actors`.

    A row has `prompt` (a string or token ids) or `messages`, and may have `sampling_params`, an object of the fields in
    which it differs from those of all rows. Every other column stays as it is. Added are `generated_text`,
    `generated_token_ids`, `finish_reason`, `num_prompt_tokens`, `num_cached_tokens` and `error`: "", or what is wrong
    with a row, which then has no output; the others run. Which actor gets a row is Ray's choice, so a row that samples
    gives the same in each run only if its sampling_params have a `seed`.
    """

    def __init__(self, model: str, sampling_params: SamplingParams | None = None, **options: Any) -> None:
        """
        Args:
            sampling_params: of all rows; None means the model's generation_config.
            options: see `EngineConfig`.
        """
        if sampling_params is not None:
            _refuse_what_has_no_column(sampling_params)
        self._llm = SharedLLM(model, **options)
        self._params = sampling_params or self._llm.get_default_sampling_params()
        self._threads = ThreadPoolExecutor(MAX_BATCHES)

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A coroutine, so that Ray overlaps also the batches of one block."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.generate, batch)

    def generate(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the rows of a batch (columns by name); may be called in many threads at a time."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        added: list[dict[str, Any]] = [dict(_NO_OUTPUT) for _ in rows]

        good: list[dict[str, Any]] = []  # the results of the rows that run

        def requests() -> Iterator[Request]:
            for row, result in zip(rows, added, strict=True):
                try:
                    request = self._prepare(row)
                except (TypeError, ValueError) as error:
                    result["error"] = str(error)
                else:
                    good.append(result)
                    yield request

        for index, output in self._llm.stream(requests()):
            good[index] |= {
                "generated_text": output["text"],
                "generated_token_ids": output["token_ids"],
                "finish_reason": output["finish_reason"],
                "num_prompt_tokens": len(output["prompt_token_ids"]),
                "num_cached_tokens": output["num_cached_tokens"],
                "error": output.error or "",
            }
        return {**batch, **{name: [result[name] for result in added] for name in _NO_OUTPUT}}

    def _prepare(self, row: Mapping[str, Any]) -> Request:
        """Raises a TypeError or a ValueError for a bad row."""
        given = {name: _plain(row[name]) for name in ("prompt", "messages") if row.get(name) is not None}
        if len(given) != 1:
            raise ValueError('a row has either "prompt" or "messages"')
        own = row.get("sampling_params") or {}
        if not isinstance(own, Mapping):
            raise refuse(own, "sampling_params", "an object of SamplingParams' fields")
        # Arrow gives every row the fields that any row has, as None.
        changes = {k: _plain(v) for k, v in own.items() if v is not None}
        if isinstance(bias := changes.get("logit_bias"), Mapping):
            changes["logit_bias"] = {token: value for token, value in bias.items() if value is not None}
        if isinstance(fits := changes.get("structured_outputs"), Mapping) and isinstance(fits.get("json"), Mapping):
            raise ValueError("structured_outputs.json is an object; a row has it as text, for Arrow mixes objects")
        prompt = given["prompt"] if "prompt" in given else self._llm.render_chat(given["messages"], None)
        params = replace(self._params, **changes)
        _refuse_what_has_no_column(params)
        return self._llm.prepare(prompt, params)


def _refuse_what_has_no_column(params: SamplingParams) -> None:
    asked = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, value in {**asked, "n above 1": None if params.n == 1 else params.n}.items():
        if value is not None:
            raise ValueError(f"sampling_params has {name}, for which there is no column: use LLM.stream for them")


_NO_OUTPUT = {
    "generated_text": "",
    "generated_token_ids": [],
    "finish_reason": "",
    "num_prompt_tokens": 0,
    "num_cached_tokens": 0,
    "error": "",
}


def _plain(value: Any) -> Any:
    """numpy's values and arrays, which Ray's batches hold, as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value
