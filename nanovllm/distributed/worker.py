"""The program of a follower: follower_process.py starts it with the descriptor of a socket to rank 0.

The follower reads one line of JSON from the socket: how to start. It sends a line for each stage that it reaches, a
line with a traceback if it fails, and an empty line every second as a sign of life. When the socket closes, rank 0 has
ended, and the follower ends, too.
"""

import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BEAT = 1.0
"""Seconds between two signs of life. The follower also looks as often whether its parent process is still rank 0,
because the socket stays open as long as a fork of rank 0 holds it."""


def main(fd: int) -> None:
    """Run steps until rank 0 says that there are no more, then end the process.

    It ends without the interpreter's clean-up, which may wait for other ranks.

    Args:
        fd: the socket's descriptor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    faulthandler.enable()
    rank0 = socket.socket(fileno=fd)
    rank0.set_inheritable(False)
    parent = os.getppid()
    line = rank0.makefile("r", encoding="utf-8").readline()
    if not line:
        os._exit(1)
    start = json.loads(line)
    sending = threading.Lock()
    meeting = Path(start["meeting"])
    threading.Thread(target=_end_with_rank0, args=(rank0, parent, sending, meeting), daemon=True).start()

    def send(**message: Any) -> None:
        with sending:
            rank0.sendall(json.dumps(message).encode() + b"\n")

    try:
        follow(start, lambda stage: send(stage=stage))
    except BaseException as error:
        # By its name, because importing the class would import torch, before the thread above runs.
        is_cause = type(error).__name__ != "PeerLostError"
        with suppress(OSError):  # rank 0 has ended, and that is why this failed
            send(error=traceback.format_exc(), is_cause=is_cause)
        _end_failed(meeting)
    os._exit(0)


def _end_with_rank0(rank0: socket.socket, parent: int, sending: threading.Lock, meeting: Path) -> None:
    """Send signs of life until rank 0 has ended, then end this process, whatever its main thread is doing.

    Args:
        parent: rank 0's process id.
        sending: held while a line is sent.
        meeting: the folder where the ranks met.
    """
    poll = select.poll()  # select.select refuses large descriptors
    poll.register(rank0, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(1000 * BEAT):  # the end of the stream: rank 0 sends nothing after the first line
            break
        if sending.acquire(blocking=False):  # if the main thread is sending a line, that is a sign of life
            with suppress(OSError):  # the socket is full: rank 0 is stopped, and reads again when it goes on
                rank0.send(b"\n", socket.MSG_DONTWAIT)
            sending.release()
    _end_failed(meeting)


def _end_failed(meeting: Path) -> None:
    """Remove the folder where the ranks met, because rank 0 may have been killed, and end this process.

    When rank 0 is killed, two threads may call this: one has seen its socket close, the other has lost its peers.
    """
    shutil.rmtree(meeting, ignore_errors=True)
    os._exit(1)


def follow(start: dict[str, Any], report_stage: Callable[[str], None]) -> None:
    """Be one rank: load its share of the model, connect, and run every plan that rank 0 runs.

    Args:
        start: from `follower_group.make_start_message`, with the ring's descriptor and the meeting folder.
        report_stage: tells rank 0 that "loaded" or "ready" is reached.
    """
    import torch

    from nanovllm.config import ResolvedConfig
    from nanovllm.distributed.collectives import GroupParallel
    from nanovllm.distributed.commands import COMMAND, receive_command
    from nanovllm.distributed.ring import Ring
    from nanovllm.engine.plan import StepPlan
    from nanovllm.load import make_runner
    from nanovllm.models.config import load_model_config
    from nanovllm.renewal import RankRenewal
    from nanovllm.runner.startup import make_cache

    config = ResolvedConfig(**start["config"])
    ring = Ring(start["ring_fd"], config.tensor_parallel_size - 1, StepPlan.max_packed_size(config))
    os.close(start["ring_fd"])
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = start["rank"]
    parallel = GroupParallel(rank, config.tensor_parallel_size, config.distributed_backend, device)
    folder = None if start["folder"] is None else Path(start["folder"])
    runner = make_runner(config, load_model_config(start["hf_config"], "rank 0"), folder, parallel)
    report_stage("loaded")
    parallel.connect(Path(start["meeting"]))
    make_cache(runner)
    report_stage("ready")
    renewal = RankRenewal(runner)
    while len(packed := ring.read(rank - 1)):
        if packed[0] == COMMAND:
            renewal.run(*receive_command(packed, parallel, device))
        else:
            runner.launch(StepPlan.unpack(packed))
    runner.close()
    parallel.close()
