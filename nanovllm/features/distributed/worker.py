"""The program of a follower: follower_process.py starts it with the descriptor of a socket to rank 0.

The follower reads one dict from the socket: how to start. It sends a dict for each stage that it reaches, one with a
traceback if it fails, and an empty one every second as a sign of life. When the socket closes, rank 0 has ended, and
the follower ends, too.
"""

import os
import shutil
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.features.distributed.follower_process import BEAT, MEETING, receive_start, show_life

if TYPE_CHECKING:
    from nanovllm.features.distributed.collectives import GroupParallel
    from nanovllm.features.distributed.ring import Ring
    from nanovllm.runner.model_runner import ModelRunner


def main(fd: int) -> None:
    """Run steps until rank 0 says that there are no more, then end the process.

    It ends without the interpreter's clean-up, which may wait for other ranks.

    Args:
        fd: the socket's descriptor.
    """
    meeting = Path(os.environ[MEETING])
    try:
        rank0, parent, start = receive_start(fd)
    except (OSError, EOFError):
        _end_failed(meeting)
    sending = threading.Lock()
    threading.Thread(target=_end_with_rank0, args=(rank0, parent, sending, meeting), daemon=True).start()

    def send(**message: Any) -> None:
        with sending:
            rank0.send(message)

    try:
        follow(start, meeting, send)
    except BaseException as error:
        # By its name, because importing the class would import torch, before the thread above runs.
        is_cause = type(error).__name__ != "PeerLostError"
        with suppress(OSError):  # rank 0 has ended, and that is why this failed
            send(error=traceback.format_exc(), is_cause=is_cause)
        _end_failed(meeting)
    os._exit(0)


def _end_with_rank0(rank0: Connection, parent: int, sending: threading.Lock, meeting: Path) -> None:
    """Send signs of life until rank 0 has ended, then end this process, whatever its main thread is doing.

    Args:
        parent: rank 0's process id.
        sending: held while a report is sent.
        meeting: the folder where the ranks met.
    """
    while os.getppid() == parent and not rank0.poll(BEAT):  # the end of the stream: rank 0 sends nothing but the start
        show_life(rank0, sending)
    _end_failed(meeting)


def _end_failed(meeting: Path) -> NoReturn:
    """Remove the folder where the ranks met, because rank 0 may have been killed, and end this process.

    When rank 0 is killed, two threads may call this: one has seen its socket close, the other has lost its peers.
    """
    shutil.rmtree(meeting, ignore_errors=True)
    os._exit(1)


def follow(start: dict[str, Any], meeting: Path, send: Callable[..., None]) -> None:
    """Be one rank: load its share of the model, connect, and run every plan that rank 0 runs.

    Args:
        start: the message that `follower_group.make_start_message` made, with the ring's descriptor.
        meeting: the folder where the ranks meet.
        send: tells rank 0 that a stage, "loaded" or "ready", is reached, or how a span of time was spent.
    """
    import torch

    from nanovllm.features.distributed.collectives import GroupParallel
    from nanovllm.features.distributed.pipeline import StageParallel, StageRunner
    from nanovllm.features.distributed.ring import make_ring
    from nanovllm.load import make_runner
    from nanovllm.models.model_config import load_model_config
    from nanovllm.runner.kv_memory import make_cache

    config = start["config"]
    ring = make_ring(config, start["ring_fd"])
    os.close(start["ring_fd"])
    device = torch.device(config.device)
    torch.get_device_module(device.type).set_device(device)
    is_pipeline = config.pipeline_parallel_size > 1
    group = GroupParallel(start["rank"], config.num_ranks, config.distributed_backend, device, is_pipeline)
    hf_config = load_model_config(start["hf_config"], "rank 0", config.model_impl)
    make = partial(make_runner, config, hf_config, start["folder"])
    if is_pipeline:
        report = None if config.trace is None else lambda span: send(span=span)
        runner = make(StageParallel(group), runner_class=partial(StageRunner, group=group, report=report))
    else:
        runner = make(group)
    send(stage="loaded")
    group.connect(meeting)
    make_cache(runner)
    send(stage="ready")
    obey(ring, runner, group)
    runner.close()
    group.close()


def obey(ring: "Ring", runner: "ModelRunner", group: "GroupParallel") -> None:
    """Run the plans and commands of rank 0, in their order, until it sends an empty message."""
    from nanovllm.engine.plan import StepPlan
    from nanovllm.features.distributed.pipeline import StageRunner
    from nanovllm.features.distributed.rank_commands import COMMAND, DRAFT, receive_command
    from nanovllm.features.distributed.ring import unpack_plan
    from nanovllm.features.renewal import RankRenewal

    run: Callable[[StepPlan], object] = runner.run_stage if isinstance(runner, StageRunner) else runner.launch
    renewal = RankRenewal(runner)
    while len(packed := ring.read(group.rank - 1)):
        if packed[0] == COMMAND:
            renewal.run(*receive_command(packed, group, runner.device))
        elif packed[0] == DRAFT:
            assert runner.draft is not None
            runner.draft.launch(unpack_plan(packed[1:]))
        else:
            run(unpack_plan(packed))
