"""An engine for Ray Data, to be used in any pipeline:

import ray
from nanovllm import SamplingParams
from nanovllm.ray import RayLLM, actors
rows = [{"n": n, "messages": [{"role": "user", "content": f"what is {n} + 17?"}]} for n in range(3, 103)]
outputs = ray.data.from_items(rows).map_batches(
    RayLLM,
    fn_constructor_args=("tiny-qwen3", SamplingParams(temperature=0.0)),
    batch_size=64,
    **actors(replicas=1),
)
for row in outputs.iter_rows():
    print(row["n"], row["generated_text"], row["error"])  # in any order
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

try:
    import ray
    from ray.data import ActorPoolStrategy
except ImportError as error:
    raise ImportError("Ray Data is not installed: pip install 'ray[data]'") from error

from nanovllm.engine.pooling import Pooling
from nanovllm.engine.sequence import Request
from nanovllm.features.scoring.embedding import read_embedding
from nanovllm.features.sharing import EngineThread
from nanovllm.llm import LLM
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams, change_defaults
from nanovllm.utils.checks import refuse

logger = logging.getLogger(__name__)

MAX_BATCHES = 64
"""An actor works on at most this many batches at a time. Each has a thread, which only waits."""


def actors(
    replicas: int = 1,
    *,
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    on_gpu: bool = False,
    num_batches: int = 4,
) -> dict[str, Any]:
    """Return the arguments of `map_batches` that make a pool of engines.

    Args:
        replicas: the number of actors.
        data_parallel_size: the number of engines in each of them, as in `RayLLM(..., data_parallel_size=...)`. Those of
            an actor are on one machine.
        tensor_parallel_size, pipeline_parallel_size: as in `EngineConfig`. Their product is the number of GPUs of each
            engine, or of its CPUs if on_gpu is False.
        num_batches: how many batches an actor works on at a time, at most 64. Together they should hold some more rows
            than max_num_seqs, so that there is always a next row to run.
    """
    num_ranks = data_parallel_size * tensor_parallel_size * pipeline_parallel_size
    if not on_gpu and ray.is_initialized():
        num_cpus = ray.cluster_resources().get("CPU", 0)
        needed = replicas * num_ranks + 1
        if num_cpus < needed:
            logger.warning(
                f"the cluster has {num_cpus:g} CPUs; {replicas} actors of {num_ranks} and one for reading need "
                f"{needed}, and Ray would wait for ever to read: use fewer replicas, or ray.init(num_cpus={needed})"
            )
    num_batches = min(num_batches, MAX_BATCHES)
    pool = ActorPoolStrategy(
        size=replicas,
        max_tasks_in_flight_per_actor=num_batches,
        max_concurrent_calls_per_actor=num_batches,
        enable_true_multi_threading=True,
    )
    return {"compute": pool, "num_gpus" if on_gpu else "num_cpus": num_ranks}


class RayLLM:
    """An `LLM`, for `ray.data.Dataset.map_batches`. An actor works on several batches at a time: see `actors`.

    A row has `prompt` (a string or token ids) or `messages`. It may have `sampling_params`: an object of the fields in
    which it differs from the other rows. Its other columns stay as they are. The columns `generated_text`,
    `generated_token_ids`, `finish_reason`, `num_prompt_tokens`, `num_cached_tokens` and `error` are added. `error` says
    what is wrong with the row, or is "". A bad row has no output, and stops no other row. Ray chooses which actor gets
    a row, so a row that samples gives the same output in every run only if its sampling_params have a `seed`.

    With `SamplingParams(max_tokens=0, embed=True)` for all rows, the column `embedding` (normalised float32 values, as
    from `LLM.embed`) takes the place of the three columns of what was generated. It is empty for a bad row.
    """

    def __init__(self, model: str, sampling_params: SamplingParams | None = None, **options: Any) -> None:
        """
        Args:
            sampling_params: the parameters of all rows; None means the model's generation_config.
            options: see `EngineConfig`.
        """
        if sampling_params is not None:
            _refuse_without_column(sampling_params)
        self._llm = LLM(model, **options)
        self._engine = EngineThread(self._llm.engine)
        self._params = sampling_params or self._llm.get_default_sampling_params()
        self._no_output = _NO_EMBEDDING if self._params.embed else _NO_OUTPUT

    def generate(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the rows of a batch, and return it with the columns added. Many threads may call it at a time.

        Args:
            batch: a column of values for each name.
        """
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        results: list[dict[str, Any]] = [dict(self._no_output) for _ in rows]
        running: list[dict[str, Any]] = []
        """The results of the rows that are not bad, in their order."""

        def prepare_requests() -> Iterator[Request]:
            for row, result in zip(rows, results, strict=True):
                try:
                    request = self._prepare(row)
                except (TypeError, ValueError) as error:
                    result["error"] = str(error)
                else:
                    running.append(result)
                    yield request

        for position, output in self._engine.stream(prepare_requests()):
            running[position] |= _read_columns(output, self._llm.engine.facts.pooling)
        return {**batch, **{name: [result[name] for result in results] for name in self._no_output}}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run `generate`. In a pool of `actors`, Ray calls it in several threads at a time."""
        return self.generate(batch)

    def _prepare(self, row: Mapping[str, Any]) -> Request:
        """Return the request of a row. Raises a TypeError or a ValueError if the row is bad."""
        given = {name: _to_python(row[name]) for name in ("prompt", "messages") if row.get(name) is not None}
        if len(given) != 1:
            raise ValueError('a row has either "prompt" or "messages"')
        own = row.get("sampling_params") or {}
        if not isinstance(own, Mapping):
            raise refuse(own, "sampling_params", "an object of SamplingParams' fields")
        changes = {name: _to_integer(name, value) for name, value in _to_python(own).items()}
        prompt = given["prompt"] if "prompt" in given else self._llm.render_chat(given["messages"], None)
        params = change_defaults(self._params, changes)
        _refuse_without_column(params)
        if params.embed != self._params.embed:
            raise refuse(params.embed, "sampling_params.embed", "the same in all rows")
        return self._llm.prepare(prompt, params)


def _refuse_without_column(params: SamplingParams) -> None:
    """Raise a ValueError if the parameters ask for something that has no column in the result."""
    asked = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, value in {**asked, "n above 1": None if params.n == 1 else params.n}.items():
        if value is not None:
            raise ValueError(f"sampling_params has {name}, for which there is no column: use LLM.stream instead")


_NO_COUNTS: dict[str, Any] = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "error": ""}
_NO_OUTPUT = {"generated_text": "", "generated_token_ids": [], "finish_reason": "", **_NO_COUNTS}
_NO_EMBEDDING = {"embedding": [], **_NO_COUNTS}


def _read_columns(output: Output, pooling: Pooling) -> dict[str, Any]:
    """Return the columns that an output adds to its row."""
    counts = {
        "num_prompt_tokens": len(output["prompt_token_ids"]),
        "num_cached_tokens": output["num_cached_tokens"],
        "error": output.error or "",
    }
    if "embedding" in output:
        is_good = output.error is None
        return {"embedding": read_embedding(output, pooling).embedding.tolist() if is_good else [], **counts}
    return {
        "generated_text": output["text"],
        "generated_token_ids": output["token_ids"],
        "finish_reason": output["finish_reason"],
        **counts,
    }


def _to_python(value: Any) -> Any:
    """Turn numpy's values and arrays, which Ray's batches hold, into Python's, at every depth.

    Arrow gives each object the fields of all objects in the column. The fields that an object lacks are None, and are
    left out here. Only `content` stays, because a message that calls tools may have no content.

    Raises:
        ValueError: an object that is data of its own, such as a JSON schema, is not given as text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_to_python(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    for name in ("arguments", "json"):
        if isinstance(value.get(name), Mapping):
            raise ValueError(f"{name} is an object; give it as text, because Arrow mixes the objects of all rows")
    return {name: _to_python(item) for name, item in value.items() if item is not None or name == "content"}


def _to_integer(name: str, value: Any) -> Any:
    """Turn a sampling parameter that Arrow made a float, because other rows lack it, back into an integer."""
    if not isinstance(value, float) or not value.is_integer():
        return value
    if abs(value) >= 2**53:
        raise ValueError(f"{name} is {value}, which Arrow has rounded: give all rows a {name}, or one below 2**53")
    return int(value)
