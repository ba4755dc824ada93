"""What a job is known by when it is resumed: a JSON file beside its results."""

import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from nanovllm.utils.checks import quote

logger = logging.getLogger(__name__)

FORMAT = 2
"""Of manifest and results together. Format 1 has no checksums, and does not name its format or its engine."""
START_ANEW = "--overwrite starts anew, another -o leaves it as it is"


class Manifest:
    """The input's digest, the options that decide the answers, and what is known of the engine that gave them."""

    def __init__(self, results: Path, job: Mapping[str, Any] | None) -> None:
        """job: "input" and "options"; None if it cannot be resumed, because it reads from a pipe."""
        self._results, self._job = results, job
        self.path = self.path_of(results)
        self._data: dict[str, Any] = {}

    @staticmethod
    def path_of(results: Path) -> Path:
        return results.with_name(results.name + ".job.json")

    @property
    def has_checksums(self) -> bool:
        """Whether every line of the results ends with its checksum."""
        return bool(self._data.get("format", 1) >= FORMAT)

    def create(self) -> None:
        """Write the manifest of results that are still empty. Raises an OSError."""
        if self._job is None:
            self.path.unlink(missing_ok=True)
        else:
            self._data = {"format": FORMAT, **self._job}
            write_json(self.path, self._data)

    def resume(self) -> None:
        """Read the manifest of results that are not empty; ValueError, which says what differs, if it is another's."""
        if self._job is None:
            raise ValueError(
                f"{self._results} has results, and a job that reads from a pipe cannot resume: {START_ANEW}"
            )
        try:
            self._data = json.loads(self.path.read_bytes())
            if not isinstance(self._data, dict) or not isinstance(self._data.get("format", 1), int):
                raise ValueError("it is no object with a format")
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{self._results} is not empty, and {self.path} is no job's ({quote(str(error))}): {START_ANEW}"
            ) from error
        if self._data.get("format", 1) > FORMAT:
            raise ValueError(f"{self._results} is a newer version's: {START_ANEW}")
        if self._data.get("spoilt"):
            raise ValueError(f"{self._results} cannot be resumed: {self._data['spoilt']}: {START_ANEW}")
        differences = list(_differences({name: self._data.get(name) for name in self._job}, self._job))
        if differences:
            raise ValueError(f"{self._results} is of another job: {'; '.join(differences)}: {START_ANEW}")

    def spoil(self, reason: str) -> None:
        """Never resume these results, because nobody knows which of their answers are right. Raises an OSError."""
        self._data["spoilt"] = reason
        write_json(self.path, self._data)


def _differences(before: Any, now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    before = before if isinstance(before, dict) else {}
    for name in {**before, **now}:
        was, is_ = before.get(name), now.get(name)
        if isinstance(is_, Mapping):
            yield from _differences(was, is_, f"{prefix}{name}.")
        elif was != is_:
            yield f"{prefix}{quote(name)[1:-1]} was {quote(was)} and is {quote(is_)}"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file as JSON, wholly or not at all: whatever happens, it is then new or as it was. Raises an OSError."""
    new = path.with_name(f"{_new_prefix(path)}{secrets.token_hex(8)}.new")
    try:
        # A name that nobody can have foreseen, and so no link that leads elsewhere can wait there.
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "wb") as file:
            file.write(json.dumps(data, indent=2).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_stale(path: Path) -> None:
    """Remove what a killed process left of writing this file; to be called under the job's lock."""
    for stale in path.parent.glob(f"{_new_prefix(path)}*.new"):
        stale.unlink(missing_ok=True)


def _new_prefix(path: Path) -> str:
    """Of a fixed length, so that the new file's name is none too long."""
    return f".nanovllm-{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-"
