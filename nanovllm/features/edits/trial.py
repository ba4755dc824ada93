"""Compiles a large grammar in a child process first, with limits of time, memory and stack.

A grammar can make llguidance work for minutes, take gigabytes, or overflow the stack, which kills the process. Here it
costs a child. The child is a new interpreter, not a fork, so that it is safe beside threads, CUDA and Ray. It imports
no torch and starts in 0.2 s. Its tokenizer has the real one's special tokens and 256 tokens of one byte each: how long
a compile takes hardly depends on the vocabulary.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from llguidance import LLTokenizer

from nanovllm.features.edits.compiler import compile_grammar, read_grammar
from nanovllm.utils.work_ahead import is_unwanted

SECONDS = 0.75
"""Processor time of a compile. The process of the engine then compiles the grammar again, and no signal ends that."""

BYTES = 512 << 20
"""Memory of a compile."""

STACK = 2 << 20
"""Bytes of stack: no more than threads have on any Linux. With glibc and common limits they have four times as many."""

PATIENCE = 20
"""Seconds until the child must have ended on a machine that is busy with other work."""

SECONDS_BETWEEN_LOOKS = 0.05
"""How often the waiting thread looks whether the answer is still wanted."""


def try_in_child(kind: str, text: str, special_tokens: Mapping[int, str], vocab_size: int, eos: int) -> str:
    """Compile a grammar in a child process; return its error, or "" if it is good.

    Args:
        special_tokens: their texts by id. A Lark grammar may name them.
    """
    request = {"kind": kind, "text": text, "special_tokens": special_tokens, "vocab_size": vocab_size, "eos": eos}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RUST_BACKTRACE": "0"}
    try:
        with tempfile.TemporaryFile() as file:  # a pipe would have to be filled while the child reads
            file.write(json.dumps(request).encode())
            file.seek(0)
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "nanovllm.features.edits.trial"],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for this process
            )
    except OSError as error:
        return f"it is so large that a child process must try it first, and none can be started: {error}"
    with child:
        try:
            answer = _await_answer(child)
        finally:
            child.kill()  # does nothing to a child that has ended
    try:
        return str(json.loads(answer))
    except ValueError:
        limits = f"{SECONDS} s, {BYTES >> 20} MB of memory or {STACK >> 20} MB of stack"
        return f"to compile it takes more than {limits} (the child process ended with {child.returncode})"


def _await_answer(child: "subprocess.Popen[bytes]") -> bytes:
    """Return what a child prints; nothing if that takes longer than PATIENCE.

    Raises:
        CancelledError: nobody waits for the answer any more, for example after a Ctrl-C.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if is_unwanted():
            raise CancelledError("nobody waits for this grammar any more")
        try:
            return child.communicate(timeout=SECONDS_BETWEEN_LOOKS)[0]
        except subprocess.TimeoutExpired:
            continue
    return b""


class _ByteTokenizer:
    """The tokenizer that LLTokenizer asks for. Special tokens have their ids; 256 of the others are one byte each."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, special_tokens: Mapping[int, str], vocab_size: int, eos: int) -> None:
        self.eos_token_id = eos
        self.special_token_ids = list(special_tokens)
        self.tokens = [b""] * max(vocab_size, 256 + len(special_tokens))
        ordinary = (token_id for token_id in range(len(self.tokens)) if token_id not in special_tokens)
        self._byte_ids = [next(ordinary) for _ in range(256)]
        for byte, token_id in enumerate(self._byte_ids):
            self.tokens[token_id] = bytes([byte])
        for token_id, text in special_tokens.items():
            self.tokens[token_id] = text.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._byte_ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is already lower stays."""
    _, hard = resource.getrlimit(kind)
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (bound, bound))


def _compile(tokenizer: LLTokenizer, kind: str, text: str) -> str:
    try:
        compile_grammar(tokenizer, kind, read_grammar(kind, text)[0])  # and in this thread it is taken to pieces
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    """The child: reads a request from standard input, and writes the grammar's error to standard output."""
    request = json.load(sys.stdin)
    special_tokens = {int(token_id): text for token_id, text in request["special_tokens"].items()}
    wrapped: Any = _ByteTokenizer(special_tokens, request["vocab_size"], request["eos"])
    tokenizer = LLTokenizer(wrapped)
    _limit(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of processor time, then SIGPROF ends this process
    _limit(resource.RLIMIT_CPU, int(time.process_time() + SECONDS) + 2)  # even if it does not
    if sys.platform == "linux":  # which alone tells the size of the address space
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[0])
        _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + BYTES)
    threading.stack_size(STACK)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_compile(tokenizer, request["kind"], request["text"])))
    thread.start()
    thread.join()
    print(json.dumps(found[0]))


if __name__ == "__main__":
    main()
