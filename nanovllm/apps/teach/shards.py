"""Writes and finds shards: files with the scores of some lines, which are there as a whole or not at all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.apps.jobs.job import cannot_write
from nanovllm.apps.jobs.manifest import replace_file
from nanovllm.outputs import ScoreArrays

METADATA = "teach"
"""The key of a shard's metadata, which are JSON."""
FORMATS = ("safetensors", "parquet")
DTYPES = {"float16": np.float16, "float32": np.float32}


class ScoredText(NamedTuple):
    """The scores of a line.

    Attributes:
        number: the line's number in the input, from 1.
        mask: bool [tokens], which tokens count.
        error: the code and the message of what is wrong with the line, which then has no tokens; None if it has scores.
    """

    number: int
    custom_id: str | None
    arrays: ScoreArrays
    mask: NDArray[np.bool_]
    error: tuple[str, str] | None = None


@dataclass
class Progress:
    """The end of the shards that are there. The metadata of a shard has what was done when it was written.

    Attributes:
        num_shards: how many shards there are.
        last_line: the number of the last line that they hold; 0 if there is none.
        num_lines, num_failed: how many lines they hold, and how many of these are errors.
    """

    num_shards: int = 0
    last_line: int = 0
    num_lines: int = 0
    num_failed: int = 0


class Shards:
    """The shards of a folder.

    Attributes:
        progress: what they hold.
    """

    def __init__(self, folder: Path, kind: str, dtype: str, top: int) -> None:
        """
        Args:
            kind: of `FORMATS`.
            dtype: of `DTYPES`; that of the log-probabilities of the most likely tokens.
        """
        self._folder = folder
        self._kind = kind
        self._dtype = DTYPES[dtype]
        self._top = top
        self.progress = Progress()

    def find(self) -> None:
        """Read what the shards hold. ValueError if one of them is missing or damaged."""
        for number, path in enumerate(sorted(self._folder.glob(f"shard-*.{self._kind}"))):
            if path != self._path(number):
                raise ValueError(f"{self._path(number)} is missing: bring it back, or give --overwrite to start anew")
            try:
                self.progress = Progress(**read_metadata(path)["progress"])
            except Exception as error:  # safetensors and pyarrow have errors of their own
                raise ValueError(
                    f"{path} is no shard ({error}): remove it and all later ones, and they are made again"
                ) from error

    def write(self, texts: Sequence[ScoredText]) -> None:
        """Write the next shard. OutputError if that fails; then no part of it is left."""
        before = self.progress
        num_failed = sum(text.error is not None for text in texts)
        progress = Progress(
            before.num_shards + 1, texts[-1].number, before.num_lines + len(texts), before.num_failed + num_failed
        )
        errors = {text.number: text.error[1] for text in texts if text.error is not None}
        facts = {"progress": vars(progress), "errors": errors, "custom_ids": [text.custom_id for text in texts]}
        metadata = {METADATA: json.dumps(facts)}  # safetensors writes several entries in any order
        path = self._path(before.num_shards)
        encode = self._encode_safetensors if self._kind == "safetensors" else self._encode_parquet
        content = encode(texts, metadata)
        try:
            replace_file(path, content)
        except OSError as error:
            raise cannot_write(path, error) from error
        self.progress = progress

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:06}.{self._kind}"

    def _join(self, texts: Sequence[ScoredText]) -> dict[str, NDArray[Any]]:
        """Return the arrays of texts one after another, by name."""
        joined = {name: np.concatenate([getattr(text.arrays, name) for text in texts]) for name in ScoreArrays._fields}
        with np.errstate(over="ignore"):  # below float16's least number comes -inf
            joined["logprobs"] = joined["logprobs"].astype(self._dtype)
        joined["mask"] = np.concatenate([text.mask for text in texts])
        joined["offsets"] = np.cumsum([0, *(len(text.mask) for text in texts)], dtype=np.int64)
        joined["lines"] = np.array([text.number for text in texts], np.int64)
        return joined

    def _encode_safetensors(self, texts: Sequence[ScoredText], metadata: dict[str, str]) -> bytes:
        from safetensors.numpy import save

        return save(self._join(texts), metadata)

    def _encode_parquet(self, texts: Sequence[ScoredText], metadata: dict[str, str]) -> bytes:
        """Return a table with a row for each line. A column of tokens has a list in each row."""
        import pyarrow
        import pyarrow.parquet

        arrays = self._join(texts)
        offsets = arrays.pop("offsets").astype(np.int32)
        columns = {"line": pyarrow.array(arrays.pop("lines"))}
        columns["custom_id"] = pyarrow.array([text.custom_id for text in texts], pyarrow.string())
        for name, values in arrays.items():
            tokens = pyarrow.array(values.reshape(-1))
            if values.ndim > 1:
                tokens = pyarrow.FixedSizeListArray.from_arrays(tokens, self._top)
            columns[name] = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), tokens)
        file = BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns).replace_schema_metadata(metadata), file)
        return file.getvalue()


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a shard: its `progress`, its `custom_ids`, and its `errors` by the numbers of lines."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as file:
            written = file.metadata()[METADATA]
    else:
        import pyarrow.parquet

        written = pyarrow.parquet.read_schema(path).metadata[METADATA.encode()]
    metadata: dict[str, Any] = json.loads(written)
    return metadata
