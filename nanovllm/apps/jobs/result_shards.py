"""Arrays of the most likely tokens beside the results of a job: shards that are always in step with the results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.apps.jobs.job import Job, ShardOptions
from nanovllm.apps.jobs.manifest import Manifest
from nanovllm.apps.jobs.request_lines import RequestLine, read_num_logprobs
from nanovllm.apps.jobs.result_lines import LineArrays, ResultLine
from nanovllm.apps.jobs.shards import ScoredText, Shards
from nanovllm.apps.jobs.source import Source
from nanovllm.features.scoring.arrays import allocate, read_output_arrays
from nanovllm.outputs import Output
from nanovllm.utils.checks import as_integer, refuse

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.engine.sequence import Sequence as EngineSequence
    from nanovllm.llm import LLM

OPTION = "--top-logprobs-count"


@dataclass
class Span:
    """The bytes of the file of results that the lines of the last shard take, or will take."""

    start: int = 0
    end: int = 0


class ResultShards:
    """Keeps results and shards in step. A result is held until its arrays are on the disk.

        results -> held -> a shard with their arrays -> appended to the file of results

    So a result is never without its arrays. A kill may leave a last shard whose results are not all appended: then this
    shard, and those of its results that are there, are removed, and their lines are answered again.
    """

    def __init__(self, options: ShardOptions, job: Job, source: Source, identity: Mapping[str, Any] | None) -> None:
        """
        Args:
            identity: what must be the same when the job is resumed; None if it cannot be.

        Raises:
            ValueError, OutputError: see `Shards`.
        """
        as_integer(options.top, OPTION, 1)
        if identity is None:
            raise ValueError("--top-logprobs-file needs files for the input and the results: a pipe has no second run")
        if job.config.data_parallel_size > 1:
            raise refuse(job.config.data_parallel_size, "--replicas", "1 with --top-logprobs-file")
        if job.reuse:
            raise refuse(
                ", ".join(job.reuse), "--reuse", "left out with --top-logprobs-file, as copied answers have no arrays"
            )
        manifest_of = Path(options.folder) / "teach"
        if Path(job.output).resolve() == manifest_of.resolve():
            raise refuse(job.output, "--output", "another path: the manifest of the shards would be its own, too")
        # Without the name of the results another job of the same lines might take away a last shard.
        named = {**identity["options"], "results": Path(job.output).name}
        self.manifest = Manifest(manifest_of, {**identity, "options": named}, job.accept_changes)
        self._options = options
        self._shards = Shards(options, self.manifest, source, Span, job.overwrite)
        self._held: list[ResultLine] = []
        self._num_tokens = 0
        """Those of the held results."""

    def recover(self, size: int) -> int:
        """Return how many bytes of the results have their arrays. The rest must be cut off.

        Args:
            size: how many bytes the results have.

        Raises:
            ValueError: the results are not those of the shards.
        """
        span = self._shards.progress
        if span.start <= size < span.end:
            self._shards.remove_last()
            return int(span.start)
        if size != span.end:
            raise ValueError(
                f"the results have {size} bytes, and those of the shards in {self._options.folder} have {span.end}: "
                "bring back the files that belong together, or give --overwrite to start anew"
            )
        return size

    def hold(self, result: ResultLine) -> bool:
        """Keep a result, and tell whether the results that are held fill a shard."""
        self._held.append(result)
        if result.arrays is not None:
            self._num_tokens += sum(len(arrays.token_ids) for arrays in result.arrays.choices)
        return self._num_tokens >= self._options.tokens

    def release(self, size: int) -> Sequence[ResultLine]:
        """Write the arrays of the held results into a shard, and return the results. OutputError if that fails.

        Args:
            size: how many bytes the results have. All of them are on the disk.
        """
        held = self._held
        self._held = []
        self._num_tokens = 0
        if held:
            texts = [text for result in held for text in self._list_texts(result)]
            self._shards.write(texts, Span(size, size + sum(len(result.line) for result in held)))
        return held

    def _list_texts(self, result: ResultLine) -> Iterator[ScoredText]:
        """Yield the arrays of each choice of a result; of another result, that of an error included, empty ones."""
        found = result.arrays or LineArrays(np.empty(0, np.int32), [allocate((), self._options.top)])
        for arrays in found.choices:
            mask = np.ones(len(arrays.token_ids), np.bool_)
            yield ScoredText(result.number, result.custom_id, arrays, mask, result.error, found.prompt_token_ids)

    def close(self) -> None:
        """Give the lock of the folder back."""
        self._shards.close()


class ArrayReader:
    """Has an engine compute the most likely tokens for all requests that generate tokens, and reads them as arrays."""

    def __init__(self, llm: "LLM", top: int) -> None:
        """Raises a ValueError if the vocabulary has fewer tokens than `top`."""
        self._llm = llm
        self._top = as_integer(top, OPTION, 1, llm.engine.config.vocab_size)

    def ask(self, request: "Request") -> "Request":
        """Return a request that asks for the most likely tokens, too."""
        params = request.params
        if params.max_tokens == 0:
            return request
        return replace(request, params=replace(params, logprobs=max(self._top, params.logprobs or 0)))

    def run(self, requests: Any) -> Iterator[tuple[int, Any]]:
        """Yield (number, sequence) of each request when it ends: `read` takes the sequence."""
        return self._llm.run_requests(requests, make_output=lambda seq: seq)

    def read(self, line: RequestLine, seq: "EngineSequence") -> tuple[Output, LineArrays]:
        """Return the output of a line, with as many log-probabilities as it asks for, and its arrays."""
        arrays = LineArrays(np.array(seq.prompt_token_ids, np.int32), [])
        for one in (seq, *seq.others):
            arrays.choices.append(read_output_arrays(one, self._top))
            one.params = replace(one.params, logprobs=read_num_logprobs(line))
        return self._llm.engine.make_output(seq), arrays
