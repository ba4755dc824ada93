"""The program of a replica: an engine in a process of its own. replicas.py starts it with the descriptor of a socket.

It receives a `Start`, and then messages: a request, ABORT to end all requests, None to end the process.
It sends dicts, with new values of the attributes of `Replica`:

    {"config": ResolvedConfig, "stats": ...}            once, when the engine is loaded
    {"ended": [(number, Output), ...], "stats": ...}    when requests have ended, and ten times a second
    {"is_aborting": False, "stats": ...}                after ABORT
    {"error": Exception}                                before it ends because of one
    {}                                                  every second, as a sign of life, from a thread of its own: so
                                                        a load or a step may take as long as it likes
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from nanovllm.config import EngineConfig
from nanovllm.features.distributed.follower_process import BEAT, receive_start, show_life

ABORT = "abort"
INTERVAL = 0.1
"""The counts are sent at least every so many seconds while requests run."""


class Start(NamedTuple):
    """Tells a replica which engine it is, and its share of the machine.

    Attributes:
        cpus: the hardware threads that it may run on; empty if it may run on all.
        memory: the bytes that it may take.
        variables: what its environment has beside that of the user's process.
    """

    config: EngineConfig
    cpus: set[int]
    memory: int
    variables: dict[str, str]


def main(fd: int) -> None:
    """Run requests until the user's process says that there are no more, then end the process.

    Args:
        fd: the socket's descriptor.
    """
    try:
        connection, parent, start = receive_start(fd)
    except (OSError, EOFError):
        os._exit(1)
    if start.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, start.cpus)  # before there are other threads: each inherits it
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read_messages, args=(connection, inbox), daemon=True).start()
    sending = threading.Lock()
    threading.Thread(target=_show_that_it_lives, args=(connection, parent, sending), daemon=True).start()

    def send(**message: Any) -> None:
        with sending:
            connection.send(message)

    is_loaded = False
    try:
        # These imports load torch.
        from nanovllm.load import load_engine
        from nanovllm.utils import memory

        memory.share = start.memory
        with closing(load_engine(start.config)) as engine:
            send(config=engine.config, stats=engine.stats())
            is_loaded = True
            serve(engine, send, inbox)
    except BaseException as error:
        is_mistake = isinstance(error, ValueError) and not is_loaded
        with suppress(OSError):  # the user's process does not listen any more
            send(error=ValueError(str(error)) if is_mistake else RuntimeError(traceback.format_exc()))
        os._exit(1)
    os._exit(0)


def _show_that_it_lives(connection: Connection, parent: int, sending: threading.Lock) -> None:
    """Send a sign of life every second until the user's process has ended, then end this one."""
    while os.getppid() == parent:
        show_life(connection, sending)
        time.sleep(BEAT)
    os._exit(1)


def _read_messages(connection: Connection, inbox: "SimpleQueue[Any]") -> None:
    """Read all messages as they come, so that whoever sends one never waits for a step. End with the user's process."""
    message: Any = ABORT
    try:
        while message is not None:
            message = connection.recv()
            inbox.put(message)
    except (EOFError, OSError):
        os._exit(1)


def serve(engine: Any, send: Callable[..., None], inbox: "SimpleQueue[Any]") -> None:
    """Run the requests of the inbox until it has a None.

    Args:
        engine: an `LLMEngine`.
        send: tells the user's process new values of attributes.
    """
    sent_at = 0.0
    while True:
        while not inbox.empty() or not engine.has_work:
            message = inbox.get()
            if message is None:
                return
            if message == ABORT:
                engine.abort_all()
                send(is_aborting=False, stats=engine.stats())
                continue
            number, token_ids, params, seed, text, limit = message
            request = engine.prepare(token_ids, replace(params, seed=seed), text)
            engine.add(replace(request, numbers=(0, number), max_len=limit))  # the first number would only make a seed
        ended = [(seq.seq_id, engine.make_output(seq)) for seq in engine.step()]
        if ended or time.monotonic() > sent_at + INTERVAL:
            send(ended=ended, stats=engine.stats())
            sent_at = time.monotonic()
