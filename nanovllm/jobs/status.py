"""How a job ends, as the exit status of its process."""

import signal
from enum import IntEnum


class Status(IntEnum):
    """After all but OK, LINES_FAILED and USAGE, as after a kill or a power cut, the same command resumes the job."""

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
    Status.OUTPUT_FAILED: "the results could not be written (the disk is full); run the command again to resume",
    Status.BROKEN: "the engine or the input failed on the way; run the command again to resume",
    Status.INCOMPLETE: "lines have no answer, or answers of another input, because the input changed meanwhile",
    Status.INTERRUPTED: "Ctrl-C; run the command again to resume",
    Status.TERMINATED: "SIGTERM; run the command again to resume",
}
