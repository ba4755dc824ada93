"""The program of a follower in a rehearsal: worker.py, on a card of its own that is not there."""

import os

from helpers.rehearsal.cuda import rehearse


def main(fd: int) -> None:
    """Run the follower, under coverage if rank 0 runs under coverage; see `worker.main`."""
    if "COVERAGE_PROCESS_START" in os.environ:
        _measure_coverage()
    from nanovllm.features.distributed import worker  # now, so that its own lines are noted

    total, num_devices = map(int, os.environ["REHEARSAL"].split())
    with rehearse(total, num_devices):
        worker.main(fd)


def _measure_coverage() -> None:
    """Note which lines run, and write that down when the process ends: a follower ends without any clean-up."""
    import coverage

    measured = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"])
    measured.start()
    end = os._exit

    def save_and_end(code: int) -> None:
        measured.stop()
        measured.save()
        end(code)

    os._exit = save_and_end  # type: ignore[assignment]
