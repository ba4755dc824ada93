"""Equal requests of a job, and of earlier ones, are computed once: the others get a copy of the answer.

An answer depends on the model, the options, and the request alone, if the request is greedy or has a seed of its own.
A line without a seed gets one of its custom_id, so two of these lines are never equal.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.apps.jobs.compact_sets import DigestMap
from nanovllm.apps.jobs.manifest import Manifest, find_differences, read_manifest
from nanovllm.apps.jobs.request_lines import RequestLine
from nanovllm.apps.jobs.result_lines import ResultLine, copy_result, read_result_line
from nanovllm.utils.digests import digest_adapter, find_lacking

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request

logger = logging.getLogger(__name__)

NAME_BYTES = 16
OFFSET_BITS = 48
"""A place is the number of a file of results, and below it the offset of a line: of up to 256 TiB."""
OF_THE_FORM = (
    *("logprobs", "top_logprobs", "echo", "service_tier", "lora", "encoding_format", "dimensions"),
    *("use_activation", "documents", "top_n", "return_documents"),
)
"""The fields of a line that change its result, and are not in its requests."""


def name_request(line: RequestLine, requests: "Sequence[Request]") -> str:
    """Return a name that two lines share if they have the same answer; "" if nothing says what the answer will be.

    Args:
        line: its defaults are filled in.
        requests: what the line asks of the engine.
    """
    has_seed = line.body.get("seed") not in (None, -1)
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    form = {name: line.body.get(name) for name in OF_THE_FORM}
    digest.update(json.dumps([line.url, form], sort_keys=True).encode())
    for request in requests:
        params = request.params
        draws = params.temperature > 0 and params.max_tokens != 0
        if draws and not has_seed:
            return ""
        echoed = request.prompt if line.body.get("echo") else None
        opening = getattr(request.prompt, "opening", None)  # it tells whether the answer begins with thinking
        asked = repr((replace(params, seed=params.seed if draws else 0), request.max_len, echoed, opening))
        for part in (request.prompt_token_ids.tobytes(), asked.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class KnownAnswers:
    """Finds the answers of equal requests in files of results. It keeps 17 bytes for each, and reads the rest again."""

    def __init__(self, own: str, offsets: DigestMap, model_name: str) -> None:
        """
        Args:
            own: the file of this job's results.
            offsets: {name of a request: the offset in bytes of its result}, from earlier runs of this job.
        """
        self._files = [open(own, "rb")]  # noqa: SIM115  # `close` closes them
        self._places = offsets
        self._model_name = model_name

    def add(self, name: str, offset: int) -> None:
        """Note where this job's results have the answer of a request."""
        self._places.add(name, offset)

    def add_file(self, path: str, job: Mapping[str, Any], processor: str | None) -> None:
        """Note the answers of another job, unless its model or its options were others, which a warning says.

        Args:
            job: what decides the answers of this job: of the sections of its manifest, the fields that must be equal.
            processor: the only one that may have given those answers; None allows any.

        Raises:
            ValueError: the file cannot be read, or nothing tells what its answers depend on.
        """
        earlier = read_manifest(Path(path))
        if not (earlier.get("engine") or {}).get("model"):
            raise ValueError(
                f"--reuse {path}: {Manifest.path_for(Path(path))} has no digest of the model that answered"
            )
        differences = compare_adapters(earlier)
        for section, now in job.items():
            before = earlier.get(section) or {}
            differences += find_differences({name: before.get(name) for name in now}, now, f"{section}.")
        processors = earlier.get("processors", [])
        if processor is not None and processors != [processor]:
            differences.append(f"the processor was {' and '.join(processors) or 'not recorded'} and is {processor}")
        if differences:
            logger.warning("%s: nothing of it is reused: %s", path, "; ".join(differences))
            return
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--reuse {path} cannot be read: {error.strerror}") from error
        self._files.append(file)
        offset = (len(self._files) - 1) << OFFSET_BITS
        num_found = 0
        for raw in file:
            line = read_result_line(raw) if raw.endswith(b"\n") else None
            if line is not None and line.request_name:
                self._places.add(line.request_name, offset)
                num_found += 1
            offset += len(raw)
        logger.info("%s: %d answers may be reused", path, num_found)

    def find(self, line: RequestLine) -> ResultLine | None:
        """Return the result of a line whose request has an answer; None if it has none, or it cannot be read."""
        place = self._places.get(line.request_name)
        if place is None:
            return None
        file = self._files[place >> OFFSET_BITS]
        try:
            file.seek(place & ((1 << OFFSET_BITS) - 1))
            raw = file.readline()
        except OSError:
            return None
        found = read_result_line(raw)
        is_equal = found is not None and found.request_name == line.request_name
        return copy_result(raw, line, self._model_name) if is_equal else None

    def close(self) -> None:
        for file in self._files:
            file.close()


def compare_adapters(manifest: Mapping[str, Any]) -> list[str]:
    """Return which adapters of another job are not what they were."""
    changed = []
    for folder, digest in manifest.get("adapters", {}).items():
        path = Path(folder).expanduser()
        if find_lacking(path) is not None or digest_adapter(path) != digest:
            changed.append(f"the adapter {folder} is another one now")
    return changed
