"""The program of a follower in a rehearsal: worker.py, on a card of its own that is not there."""

import os

from helpers.rehearsal.cuda import rehearse
from nanovllm.features.distributed import worker


def main(fd: int) -> None:
    total, num_devices = map(int, os.environ["REHEARSAL"].split())
    with rehearse(total, num_devices):
        worker.main(fd)
