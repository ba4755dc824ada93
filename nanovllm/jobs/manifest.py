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
    """The input's digest, the options that decide the answers, and what is known of the engine that gave them.

    Its file has `format`, `input`, `options`, `engine` and, where --accept-changes was used, `changes`: for each time
    what was then different, and how many bytes the results had.
    """

    def __init__(self, results: Path, job: Mapping[str, Any] | None, accept_changes: bool = False) -> None:
        """job: "input" and "options"; None if it cannot be resumed, because it reads from a pipe."""
        self._results, self._job, self._accept_changes = results, job, accept_changes
        self.path = self.path_of(results)
        self._data: dict[str, Any] = {}
        self._size = 0
        self._engines: list[Mapping[str, Any]] = []

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

    def resume(self, size: int) -> None:
        """Read the manifest of results of so many bytes.

        Raises:
            ValueError: it is another job's, and says what differs.
            OSError: an accepted change could not be recorded.
        """
        if self._job is None:
            raise ValueError(f"{self._results} has results, and a job from a pipe cannot resume: {START_ANEW}")
        self._size = size
        self._data = self._read()
        if self._data.get("format", 1) > FORMAT:
            raise ValueError(f"{self._results} is a newer version's: {START_ANEW}")
        if self._data.get("spoilt"):
            raise ValueError(f"{self._results} cannot be resumed: {quote(self._data['spoilt'])}: {START_ANEW}")
        if differences := list(_differences(self._data.get("input"), self._job["input"], "input.")):
            raise ValueError(f"{self._results} is of another job: {'; '.join(differences)}: {START_ANEW}")
        self._take("options", self._job["options"])

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_bytes())
            if not isinstance(data, dict) or not isinstance(data.get("format", 1), int):
                raise ValueError("it is no object with a format")
        except (OSError, ValueError, RecursionError) as error:
            reason = quote(str(error))
            raise ValueError(
                f"{self._results} is not empty, and {self.path} is no job's ({reason}): {START_ANEW}"
            ) from error
        return data

    def check_engine(self, engine: Mapping[str, Any]) -> None:
        """Compare an engine, before its first answer, with the one that gave the answers before.

        Args:
            engine: see `LLM.provenance`.

        Raises:
            ValueError: it is another, and says what differs.
            OSError: it could not be recorded.
        """
        if self._job is None or engine in self._engines:
            return
        try:
            self._take("engine", engine)
        except ValueError as error:
            if self._engines:  # so that something was run
                raise RuntimeError(f"the engines of this job differ: {error}") from error
            raise
        self._engines.append(engine)

    def _take(self, section: str, now: Mapping[str, Any]) -> None:
        """Compare a section with what it is now; refuse or record what is different, and fill in what is unknown."""
        before = self._data.get(section)
        before = before if isinstance(before, dict) else {}
        if before == now:
            return
        if self._size and (unknown := [name for name in now if name not in before]):
            logger.warning(
                "%s does not say which %s gave its answers: taken to be as they are now", self.path, ", ".join(unknown)
            )
        known = {name: now[name] for name in now if name in before}
        if differences := list(_differences(before, known, f"{section}.")):
            what = "; ".join(differences)
            if not self._accept_changes:
                raise ValueError(
                    f"{self._results} has answers that were given otherwise: {what}: {START_ANEW}, --accept-changes "
                    "resumes with what is different"
                )
            logger.warning("%s: accepted: %s", self._results, what)
            changes = self._data.get("changes")
            changes = changes if isinstance(changes, list) else []
            self._data["changes"] = [*changes, {"after_bytes": self._size, "differences": differences}]
        self._data[section] = dict(now)
        write_json(self.path, self._data)

    def spoil(self, reason: str) -> None:
        """Never resume these results, because nobody knows which of their answers are right. Raises an OSError."""
        self._data["spoilt"] = reason
        write_json(self.path, self._data)


def _differences(before: Any, now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    before = before if isinstance(before, dict) else {}
    for name in {**before, **now}:
        was, is_ = before.get(name), now.get(name)
        if was != is_:
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
