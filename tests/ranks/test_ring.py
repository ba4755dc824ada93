"""The ring in shared memory: every reader gets every message whole and in order, however slow it is."""

import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.fakes import expected_tokens, make_engine
from helpers.traces import run_trace, traces
from hypothesis import given, settings

from nanovllm import SamplingParams
from nanovllm.engine.plan import StepPlan
from nanovllm.features.distributed import ring
from nanovllm.features.distributed.ring import (
    HEADER,
    NUM_SLOTS,
    Ring,
    make_anonymous_file,
    pack_plan,
    unpack_plan,
)

CAPACITY = 1000


def no_check():
    pass


def message(n: int, length: int) -> np.ndarray:
    """Message n, which tells itself from all others."""
    return (np.arange(length, dtype=np.int64) * 7919 + n).astype(np.int32)


def make_ring(num_readers: int) -> tuple[Ring, list[Ring]]:
    fd = make_anonymous_file()
    writer, *readers = (Ring(fd, num_readers, CAPACITY) for _ in range(num_readers + 1))
    os.close(fd)
    return writer, readers


def test_slow_readers_get_every_message_whole_and_in_order():
    rng = random.Random(0)
    lengths = [rng.choice((0, 1, rng.randrange(CAPACITY + 1), CAPACITY)) for _ in range(400)]
    writer, readers = make_ring(3)
    wrong: list[int] = []

    def read(reader: int) -> None:
        pause = random.Random(reader)
        for n, length in enumerate(lengths):
            if pause.random() < 0.05 * reader:
                time.sleep(pause.random() * 3e-3)
            if not np.array_equal(readers[reader].read(reader), message(n, length)):
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(reader,), daemon=True) for reader in range(3)]
    for thread in threads:
        thread.start()
    for n, length in enumerate(lengths):
        writer.write(message(n, length), no_check)
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_other_processes_read_the_same():
    code = """
import sys
from nanovllm.features.distributed.ring import Ring
ring, reader = Ring(int(sys.argv[1]), 2, 1000), int(sys.argv[2])
total = 0
while len(message := ring.read(reader)):
    total = (total * 31 + int(message.astype('i8').sum())) % (1 << 61)
print(total)
"""
    rng = random.Random(1)
    messages = [message(n, rng.randrange(1, CAPACITY)) for n in range(300)]
    fd = make_anonymous_file()
    writer = Ring(fd, 2, CAPACITY)
    command = [sys.executable, "-c", code, str(fd)]
    processes = [
        subprocess.Popen([*command, str(reader)], pass_fds=(fd,), stdout=subprocess.PIPE) for reader in range(2)
    ]
    total = 0
    for m in messages:
        writer.write(m, no_check)
        total = (total * 31 + int(m.astype("i8").sum())) % (1 << 61)
    writer.write(message(0, 0), no_check)
    os.close(fd)
    for process in processes:
        out, _ = process.communicate(timeout=300)
        assert int(out) == total


def test_a_slot_is_not_written_again_before_the_slowest_reader_has_taken_it():
    writer, (quick, slow) = make_ring(2)
    for n in range(NUM_SLOTS):
        writer.write(message(n, 10), no_check)
        quick.read(0)

    class GivingUp(Exception):
        pass

    def give_up():
        raise GivingUp

    with pytest.raises(GivingUp):
        writer.write(message(NUM_SLOTS, 10), give_up)
    assert np.array_equal(slow.read(1), message(0, 10))
    writer.write(message(NUM_SLOTS, 10), give_up)  # now there is room, and the message that gave up left no trace
    for n in range(1, NUM_SLOTS + 1):
        assert np.array_equal(slow.read(1), message(n, 10))


def test_a_message_too_long_is_refused_and_leaves_the_ring_whole():
    writer, (reader,) = make_ring(1)
    with pytest.raises(RuntimeError, match=f"{CAPACITY + 3} elements does not fit a slot of {CAPACITY}"):
        writer.write(message(0, CAPACITY + 3), no_check)
    writer.write(message(1, CAPACITY), no_check)
    assert np.array_equal(reader.read(0), message(1, CAPACITY))


def test_a_message_of_which_a_part_is_not_visible_yet_is_waited_for():
    writer, (reader,) = make_ring(1)
    writer.write(message(0, 100), no_check)
    late = writer._slots[1, 50]
    writer._slots[1, 50] += 1

    def arrive():
        writer._slots[1, 50] = late

    threading.Timer(0.1, arrive).start()
    assert np.array_equal(reader.read(0), message(0, 100))


@pytest.mark.parametrize("is_linux", [True, False])
def test_the_memory_has_no_name_and_is_its_owners_only(is_linux, tmp_path, monkeypatch):
    """macOS has no memfd_create."""
    if not is_linux:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    fd = make_anonymous_file()
    Ring(fd, 1, CAPACITY)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert set(os.listdir("/dev/shm")) == before and not list(tmp_path.iterdir())
    os.close(fd)


def test_a_limit_of_file_sizes_is_named_with_the_size_that_is_needed():
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = make_anonymous_file()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        with pytest.raises(
            ValueError, match=r"memory of 16\d{3} bytes, and RLIMIT_FSIZE.* is 4096 bytes: raise it \(`ulimit"
        ):
            Ring(fd, 1, CAPACITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        os.close(fd)


# ---- plans


@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_plans_that_cross_a_ring_give_every_request_its_own_tokens(trace):
    def pack_plans(engine):
        engine.runner.carry = lambda plan: unpack_plan(pack_plan(plan))

    config, requests = trace
    seqs, _ = run_trace(config, requests, 2, pack_plans)
    for i, (prompt, params, pair, _, aborted) in enumerate(requests):
        tokens, reason = expected_tokens(prompt, params, params.seed, config["eos"], config["max_model_len"], pair)
        output = seqs[i].output_token_ids
        assert output == tokens[: len(output)]
        assert (seqs[i].finish_reason, len(output)) == (reason, len(tokens)) or aborted is not None


def test_a_plan_survives_packing():
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64)
    for prompt in ([1, 2, 3], [4], [5] * 9):
        engine.add(engine.prepare(prompt, SamplingParams(temperature=0.5, top_p=0.25, seed=2**40 + 3, logprobs=2)))
    plan = engine.scheduler.schedule().plan
    unpacked = unpack_plan(pack_plan(plan))
    for name in plan.__slots__:
        assert np.array_equal(getattr(plan, name), getattr(unpacked, name))
    config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64, max_blocks_per_seq=8)
    assert len(pack_plan(plan)) <= HEADER + plan.max_size(config)


@pytest.mark.parametrize(("max_num_seqs", "budget", "max_len"), [(512, 16384, 4096), (4, 3, 100), (2, 1000, 64)])
def test_the_largest_plan_fits_into_the_size_that_is_reserved(max_num_seqs, budget, max_len):
    plan = StepPlan.largest(max_num_seqs, budget, max_len)
    config = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_blocks_per_seq=1)
    assert len(pack_plan(plan)) <= HEADER + StepPlan.max_size(config)


@pytest.mark.parametrize(("num_ranks", "depth"), [(2, 1), (2, 2), (3, 4), (4, 9)])
@pytest.mark.parametrize("size", [1, 20_000])
def test_an_engines_ring_has_room_for_the_plans_in_flight_and_waits_for_its_slowest_follower(num_ranks, depth, size):
    config = SimpleNamespace(num_ranks=num_ranks, depth=depth, max_num_seqs=2, max_blocks_per_seq=1)
    config.max_num_batched_tokens = size
    fd = make_anonymous_file()
    writer, *readers = (ring.make_ring(config, fd) for _ in range(num_ranks))
    os.close(fd)
    longest = 1 + HEADER + StepPlan.max_size(config)  # with the mark of a plan for the draft model

    def is_full():
        raise BlockingIOError

    written = 0
    with pytest.raises(BlockingIOError):
        while written < 50:
            writer.write(message(written, longest), is_full)
            written += 1
    assert written >= depth
    for number in range(num_ranks - 1):
        with pytest.raises(BlockingIOError):
            writer.write(message(written, longest), is_full)
        assert np.array_equal(readers[number].read(number), message(0, longest))
    writer.write(message(written, longest), is_full)
