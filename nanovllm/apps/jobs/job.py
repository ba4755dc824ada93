"""The options of a batch job, and the ways in which it can end."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams

_OF_ONE_LINE = {"seed", "logprobs", "structured_outputs"}
_OF_NO_LINE = {"prompt_logprobs", "prompt_logprob_start", "embed", "detokenize"}
DEFAULTS = tuple(one.name for one in fields(SamplingParams) if one.name not in _OF_ONE_LINE | _OF_NO_LINE)
"""The sampling parameters that a job may give to all lines. A line may have a seed, too."""
SHARD_FORMATS = ("safetensors", "parquet")


@dataclass(frozen=True)
class ShardOptions:
    """The shards that hold the most likely tokens in the place of each token of the lines.

    Attributes:
        folder: where they are written.
        top: how many of the most likely tokens they have.
        format: of `SHARD_FORMATS`.
        logprobs_dtype: "float16" or "float32".
        tokens: a shard ends with the line that gives it so many tokens.
    """

    folder: str
    top: int = 64
    format: str = "safetensors"
    logprobs_dtype: str = "float16"
    tokens: int = 1 << 14


@dataclass(frozen=True, slots=True)
class Job:
    """The files, options and engine of one batch job.

    Attributes:
        input, output: paths, or "-" for standard input and output.
        model_name: the only `model` that a line may ask for. Result lines repeat it.
        overwrite: throw away the results that are there and start anew.
        stats: the file that gets the summary as JSON.
        accept_changes: resume even if the options or the engine differ from those that gave the earlier results.
        sampling: the sampling parameters of lines that have no value of their own.
        reuse: files of results, whose answers are copied where the request is the same.
        reuse_close: copy them even where the engine does not promise the same bits.
        shards: get the most likely tokens in the place of each generated one; None if nobody wants them.
    """

    input: str
    output: str
    config: EngineConfig
    model_name: str
    overwrite: bool = False
    stats: str | None = None
    accept_changes: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    reuse: Sequence[str] = ()
    reuse_close: bool = False
    shards: ShardOptions | None = None


class Status(IntEnum):
    """The exit status of the process that runs a job.

    The same command resumes the job after every status but OK, LINES_FAILED and USAGE, and after a kill or a power cut.
    """

    OK = 0
    LINES_FAILED = 1
    USAGE = 2
    OUTPUT_FAILED = 3
    BROKEN = 4
    INCOMPLETE = 5
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


STATUS_HELP = {
    Status.OK: "every line succeeded",
    Status.LINES_FAILED: "every line is answered, some by an error",
    Status.USAGE: "nothing was run: a wrong option, model or input, or results of another job",
    Status.OUTPUT_FAILED: "the results could not be written, or were moved or changed; see the message",
    Status.BROKEN: "the engine or the input failed during the run; run the command again to resume",
    Status.INCOMPLETE: "lines have no answer, or the input changed during the run; see the message",
    Status.INTERRUPTED: "Ctrl-C; run the command again to resume",
    Status.TERMINATED: "SIGTERM; run the command again to resume",
}


class OutputError(Exception):
    """The results cannot be written, or somebody moved or changed them. The lines appended before are whole."""

    status = Status.OUTPUT_FAILED


class IncompleteError(Exception):
    """The results do not answer each line of the input exactly once."""

    status = Status.INCOMPLETE


def cannot_write(path: Path | str, error: OSError) -> OutputError:
    """Return the error to raise when a file of a job cannot be written."""
    return OutputError(f"{path} cannot be written: {error.strerror or error}")
