"""A stranger on the same machine reaches nothing of several ranks: no store to write to, no folder to enter."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import save_random

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.features.distributed import follower_group, follower_process
from nanovllm.features.distributed.collectives import FolderStore

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 64,
    "kvcache_memory_bytes": 4 << 20,
    "max_num_seqs": 4,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random(folder)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process makes its temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def listeners(pids: list[int]) -> Iterator[tuple[str, int]]:
    """(address, port) of every TCP socket on which the processes listen."""
    for pid in pids:
        inodes = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    address, port = fields[1].split(":")
                    yield address, int(port, 16)


STRANGER = """
import os, signal, sys, time, torch.distributed as dist
from datetime import timedelta
from multiprocessing import Pipe

def write(port):
    seconds = timedelta(seconds=2)
    dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds, wait_for_workers=False).set("0", "junk")

children = {}
for port in map(int, sys.argv[1:]):
    child = os.fork()
    if child:
        children[child] = port
        continue
    try:
        write(port)
    except BaseException:
        os._exit(1)
    os._exit(0)
deadline = time.monotonic() + 4
while children and time.monotonic() < deadline:
    time.sleep(0.05)
    for child in list(children):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            port = children.pop(child)
            print("refused" if status else "taken by", port)
for child in children:
    os.kill(child, signal.SIGKILL)
print("tried", len(sys.argv) - 1)
"""
"""Tries each port in a process of its own. gloo's sockets answer nothing, and may keep one waiting."""


@pytest.mark.slow
def test_no_port_takes_a_stranger_s_keys_and_the_folder_where_ranks_meet_is_private(model: Path, scratch: Path) -> None:
    """All ports are on loopback. The folder goes with the ranks."""
    with LLM(str(model), tensor_parallel_size=2, **OPTIONS) as llm:
        (folder,) = scratch.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
        expected = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        found = set(listeners([os.getpid(), *llm.engine.runner.pids]))
        assert {address for address, _ in found} <= {"0100007F"}  # 127.0.0.1
        command = [sys.executable, "-c", STRANGER, *(str(port) for _, port in found)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
        assert f"tried {len(found)}" in said and "taken by" not in said, said
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False) == expected
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_followers_import_from_folders_with_a_colon(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower, told of a model that is not there, shows in its traceback where its code comes from."""
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "nanovllm").symlink_to(Path(nanovllm.__file__).parent)
    monkeypatch.syspath_prepend(str(tmp_path / "a:b"))
    make_start_message = follower_group.make_start_message
    changes = {"folder": tmp_path / "nowhere"}
    monkeypatch.setattr(follower_group, "make_start_message", lambda *args: make_start_message(*args) | changes)
    with pytest.raises(
        RuntimeError, match=r'rank 1 of 2 failed: Traceback(.|\n)*"/.*/a:b/nanovllm/features/distributed/worker'
    ):
        LLM(str(model), tensor_parallel_size=2, **OPTIONS)


def test_a_rank_killed_in_the_midst_of_a_word_keeps_nobody_waiting(tmp_path: Path) -> None:
    """torch's FileStore would read its half of an entry for ever, with Python's lock held."""
    store = FolderStore(tmp_path, timedelta(seconds=0.2))
    (tmp_path / "1-2.new").write_bytes(b"half a wo")
    assert not store.check(["word"])
    with pytest.raises(OSError, match="does not come"):
        store.get("word")
    FolderStore(tmp_path, timedelta(seconds=5)).set("rank/0", "word")
    assert store.get("rank/0") == b"word"
    shutil.rmtree(tmp_path)
    since = time.monotonic()
    with pytest.raises(OSError):
        FolderStore(tmp_path, timedelta(minutes=10)).get("word")
    assert time.monotonic() - since < 60


WITHOUT_A_WATCHER = """
import sys, time
from nanovllm.features.distributed import worker

def fail(*_):
    time.sleep(0.5)
    raise RuntimeError("lost its peers")

worker._end_with_rank0 = lambda *_: time.sleep(1000)
worker.follow = fail
worker.main(int(sys.argv[1]))
"""


@pytest.mark.parametrize("sent", ["nothing", "a part of the first object", "all of it"])
def test_a_follower_whose_rank_0_was_killed_removes_the_folder_and_prints_nothing(sent: str, tmp_path: Path) -> None:
    """Rank 0 may be killed before it has said how to start. Later, the main thread may be the first to lose it."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    ours, theirs = Pipe()
    if sent == "all of it":
        ours.send({"rank": 1})
    elif sent == "a part of the first object":
        os.write(ours.fileno(), b"\0\0\1\0 only a part")  # the length of 256 bytes, and fewer bytes
    command = [sys.executable, "-c", WITHOUT_A_WATCHER, str(theirs.fileno())]
    variables = os.environ | {follower_process.MEETING: str(meeting)}
    with theirs:
        follower = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, env=variables)
    ours.close()
    said = follower.communicate(timeout=30)[1]
    assert (follower.returncode, said, meeting.exists()) == (1, b"", False)
