"""Reads and writes the manifest: a JSON file beside the results that tells which job they belong to."""

import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from nanovllm.apps.jobs.job import cannot_write
from nanovllm.utils.checks import quote

logger = logging.getLogger(__name__)

FORMAT = 2
"""The version of the manifest and of the results. No other version can be resumed."""
START_ANEW = "--overwrite starts anew, another -o leaves it as it is"


class Manifest:
    """The digest of the input, the options that decide the answers, and the engine that gave them.

    The file has the fields `format`, `input`, `options`, `engine`, `processors` (a list: a job may go on with another
    one), `adapters` if lines name any, and `changes` after --accept-changes was used: a list of the differences that
    were accepted, each with the size of the results in bytes at that time.
    """

    def __init__(self, results: Path, job: Mapping[str, Any] | None, accept_changes: bool = False) -> None:
        """
        Args:
            job: the fields "input" and "options"; None if the job has a pipe, and so cannot be resumed.
        """
        self._results = results
        self._job = job
        self._accept_changes = accept_changes
        self.path = self.path_for(results)
        self._data: dict[str, Any] = {}
        self._size = 0
        self._engines: list[Mapping[str, Any]] = []

    @staticmethod
    def path_for(results: Path) -> Path:
        """Return the path of the manifest that belongs to a file of results."""
        return results.with_name(results.name + ".job.json")

    def create(self) -> None:
        """Write the manifest of results that are still empty. Raises an OutputError if that fails."""
        if self._job is None:
            self.path.unlink(missing_ok=True)
        else:
            self._data = {"format": FORMAT, **self._job}
            self._write()

    def resume(self, size: int) -> None:
        """Read the manifest, and check that the results are this job's.

        Args:
            size: the size of the results in bytes.

        Raises:
            ValueError: the results are another job's; the message says what differs.
            OutputError: an accepted change cannot be recorded.
        """
        if self._job is None:
            raise ValueError(f"{self._results} has results, and a job from a pipe cannot resume: {START_ANEW}")
        self._size = size
        try:
            self._data = read_manifest(self._results)
        except ValueError as error:
            raise ValueError(f"{self._results} is not empty, and {error}: {START_ANEW}") from error
        if reason := self._data.get("spoilt"):
            raise ValueError(f"{self._results} cannot be resumed: {quote(reason)}: {START_ANEW}")
        if differences := list(find_differences(self._data.get("input"), self._job["input"], "input.")):
            raise ValueError(f"{self._results} is of another job: {'; '.join(differences)}: {START_ANEW}")
        self._compare("options", self._job["options"])

    def check_engine(self, engine: Mapping[str, Any]) -> None:
        """Compare an engine, before its first answer, with the engine that gave the earlier answers.

        Args:
            engine: see `read_provenance`.

        Raises:
            ValueError: they differ; the message says in what.
            RuntimeError: two engines of this run differ.
            OutputError: the engine cannot be recorded.
        """
        if self._job is None or engine in self._engines:
            return
        try:
            self._compare("engine", engine)
        except ValueError as error:
            if self._engines:  # lines were answered already, so this is no usage error any more
                raise RuntimeError(f"the engines of this job differ: {error}") from error
            raise
        self._engines.append(engine)

    def note_processor(self, processor: str) -> None:
        """Record a processor that gives answers. A resumed job may go on with another one."""
        known = self._data.get("processors", [])
        if self._job is not None and processor not in known:
            self._data["processors"] = [*known, processor]
            self._write()

    @property
    def adapters(self) -> dict[str, str]:
        """{folder: digest of its content} of the adapters that lines have named so far."""
        adapters = self._data.get("adapters")
        return adapters if isinstance(adapters, dict) else {}

    def check_adapters(self, found: Mapping[str, str]) -> None:
        """Record adapters before the first answer that has them, or compare them with those of earlier answers.

        Args:
            found: {folder: digest of its content}.

        Raises:
            ValueError: the content of an adapter is not that of earlier answers.
            OutputError: the adapters cannot be recorded.
        """
        if self._job is None or not found:
            return
        if found.keys() - self.adapters.keys():
            self._data["adapters"] = {**found, **self.adapters}
            self._write()
        self._compare("adapters", {**self.adapters, **found})

    def _compare(self, section: str, now: Mapping[str, Any]) -> None:
        """Compare a section with its present value. Refuse a difference, or record it if changes are accepted."""
        before = self._data.get(section)
        if before == now:
            return
        if before is not None and (differences := list(find_differences(before, now, f"{section}."))):
            listed = "; ".join(differences)
            if not self._accept_changes:
                raise ValueError(
                    f"{self._results} has answers that were given otherwise: {listed}: {START_ANEW}, --accept-changes "
                    "resumes in spite of the difference"
                )
            logger.warning("%s: accepted: %s", self._results, listed)
            changes = self._data.get("changes")
            changes = changes if isinstance(changes, list) else []
            self._data["changes"] = [*changes, {"after_bytes": self._size, "differences": differences}]
        self._data[section] = dict(now)
        self._write()

    def forbid_resume(self, reason: str) -> None:
        """Record that nobody knows which of the answers are right, so no run resumes them. Raises an OutputError."""
        if self._job is not None:
            self._data["spoilt"] = reason
            self._write()

    def _write(self) -> None:
        try:
            write_json(self.path, self._data)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def save_for(self, results: Path) -> bool:
        """Write the same manifest beside a copy of the results; return False if there is none. Raises an OSError."""
        if self._job is not None:
            write_json(self.path_for(results), self._data)
        return self._job is not None


def read_manifest(results: Path) -> dict[str, Any]:
    """Read the manifest that lies beside a file of results. ValueError if there is none."""
    path = Manifest.path_for(results)
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is no object whose format is {FORMAT}")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no manifest ({quote(str(error))})") from error
    return data


def find_differences(before: Any, now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield what was otherwise, a text for each field."""
    before = before if isinstance(before, dict) else {}
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            yield f"{prefix}{quote(name)[1:-1]} was {quote(before.get(name))} and is {quote(now.get(name))}"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file as `replace_file` does."""
    replace_file(path, json.dumps(data, indent=2).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file. After a failure the file is as it was before: it is never half written. Raises an OSError."""
    prefix = f".nanovllm-{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-"  # as short for the longest name
    for stale in path.parent.glob(f"{prefix}*.new"):  # a killed process left it
        stale.unlink(missing_ok=True)
    new = path.with_name(f"{prefix}{secrets.token_hex(8)}.new")
    try:
        with open(new, "xb") as file:  # "x" follows no link, and nobody can foresee this name
            file.write(content)
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
