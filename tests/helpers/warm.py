"""Runs scripts in children of a process that has imported torch and transformers, which takes a fresh Python seconds.

The package is not imported there: of it, a child has what its script imports. Who asks what `import torch` does, or
what a variable of the environment does to it, needs a fresh process.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn


class WarmPython:
    """Starts the process when the first script comes. `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        code: str,
        *arguments: str,
        cwd: Path | str = "/",
        environment: Mapping[str, str] | None = None,
        seconds: int = 300,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a script as `python -c code arguments` does, and wait for its end.

        Args:
            cwd: modules in this folder are found first.
            environment: variables that are set in addition to those of the tests.
        """
        if self._process is None:
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            command = [sys.executable, "-P", __file__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            task = {"code": code, "arguments": arguments, "cwd": str(cwd), "seconds": seconds, "folder": folder}
            self._process.stdin.write(json.dumps(task | {"environment": dict(environment or {})}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, "the process that forks has ended"
            said = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(["python", "-c", code, *arguments], int(line), *said)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def run_script(task: dict[str, Any]) -> NoReturn:
    """End this child with the status of a script, whose output goes into two files."""
    signal.alarm(task["seconds"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(task["folder"], name), os.O_WRONLY | os.O_CREAT), number)
    status = 1
    try:
        os.chdir(task["cwd"])
        sys.path.insert(0, task["cwd"])
        os.environ.update(task["environment"])
        sys.argv = ["-c", *task["arguments"]]
        exec(compile(task["code"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Fork a child for each line of the input, and print its status."""
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_script(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
