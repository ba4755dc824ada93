"""What runs in a follower, ranks 1 to n-1: started by follower_process.py with the descriptor of a socket to rank 0.

A follower gets one line of JSON, how to start. It sends a line for each stage that it reaches, one with a traceback if
it fails, and an empty one every second, which says that it runs. When the socket closes, rank 0 is gone, and so is the
follower.
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
"""Seconds between signs of life, and between looks at who the parent is: the socket stays open if a process that
rank 0 forked holds it."""


def main(fd: int) -> None:
    """Follow until told to stop, then end the process without the interpreter's clean-up, which may wait for peers.

    Args:
        fd: the socket's.
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
    threading.Thread(target=_end_with, args=(rank0, parent, sending, meeting), daemon=True).start()

    def send(**message: Any) -> None:
        with sending:
            rank0.sendall(json.dumps(message).encode() + b"\n")

    try:
        follow(start, lambda stage: send(stage=stage))
    except BaseException as error:
        # PeerLostError is told apart by name: importing its module here would import torch before the watch runs.
        is_cause = type(error).__name__ != "PeerLostError"
        send(error=traceback.format_exc(), is_cause=is_cause)
        os._exit(1)
    os._exit(0)


def _end_with(rank0: socket.socket, parent: int, sending: threading.Lock, meeting: Path) -> None:
    """Show rank 0 that this process runs; end it, whatever it is doing, as soon as rank 0 has ended.

    Args:
        meeting: the folder where the ranks met, which a rank 0 that was killed has left.
    """
    poll = select.poll()  # select.select would refuse a large descriptor
    poll.register(rank0, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(1000 * BEAT):  # the end of the stream: nothing is ever sent after the first line
            break
        if sending.acquire(blocking=False):  # while another line is on its way, that one will do
            with suppress(OSError):  # full: rank 0 was stopped, and reads again when it goes on
                rank0.send(b"\n", socket.MSG_DONTWAIT)
            sending.release()
    shutil.rmtree(meeting, ignore_errors=True)
    os._exit(1)


def follow(start: dict[str, Any], reached: Callable[[str], None]) -> None:
    """Be one rank: load its share, join the group, and run every plan that rank 0 runs.

    Args:
        start: as `follower_group.start_message` made it, and where the ring and the meeting are.
        reached: tells rank 0 of a stage.
    """
    import torch

    from nanovllm.config import ResolvedConfig
    from nanovllm.distributed.collectives import GroupParallel
    from nanovllm.distributed.ring import Ring
    from nanovllm.engine.plan import StepPlan
    from nanovllm.models.config import load_model_config
    from nanovllm.runner.model_runner import ModelRunner

    config = ResolvedConfig(**start["config"])
    ring = Ring(start["ring_fd"], config.tensor_parallel_size - 1, StepPlan.max_packed_size(config))
    os.close(start["ring_fd"])
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = start["rank"]
    parallel = GroupParallel(rank, config.tensor_parallel_size, config.distributed_backend, device)
    folder = None if start["folder"] is None else Path(start["folder"])
    runner = ModelRunner(config, load_model_config(start["hf_config"], "rank 0"), folder, parallel)
    reached("loaded")
    parallel.connect(Path(start["meeting"]))
    runner.make_cache()
    reached("ready")
    while len(packed := ring.read(rank - 1)):
        runner.launch(StepPlan.unpack(packed))
    runner.close()
    parallel.close()
