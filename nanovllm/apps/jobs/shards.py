"""Writes and finds shards: files with the scores of some lines, which are there as a whole or not at all."""

import json
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.apps.jobs.job import SHARD_FORMATS, ShardOptions, cannot_write
from nanovllm.apps.jobs.manifest import Manifest, replace_file
from nanovllm.apps.jobs.results_file import lock_file
from nanovllm.apps.jobs.source import Source, is_file
from nanovllm.outputs import ScoreArrays
from nanovllm.utils.checks import as_integer, quote

METADATA = "teach"
"""The key of a shard's metadata, which are JSON."""
DTYPES = {"float16": np.float16, "float32": np.float32}


class ScoredText(NamedTuple):
    """The scores of a line.

    Attributes:
        number: the line's number in the input, from 1.
        mask: bool [tokens], which tokens count.
        error: the code and the message of what is wrong with the line, which then has no tokens; None if it has scores.
        prompt_token_ids: int32, what stands before a text that was generated; None if nothing does.
    """

    number: int
    custom_id: str | None
    arrays: ScoreArrays
    mask: NDArray[np.bool_]
    error: tuple[str, str] | None = None
    prompt_token_ids: NDArray[np.int32] | None = None


class Shards:
    """The shards of a folder. No other process writes them before this object is closed.

    Attributes:
        manifest: tells which job they are of.
        num_shards: how many there are.
        progress: what was done when the last of them was written.
    """

    def __init__(
        self,
        options: ShardOptions,
        manifest: Manifest,
        source: Source,
        new_progress: Callable[..., Any],
        overwrite: bool,
    ) -> None:
        """
        Args:
            new_progress: makes a dataclass, the progress, of its fields in the metadata; of nothing: that of no shard.
            overwrite: remove the shards that are there.

        Raises:
            ValueError: an option is wrong, the shards are another job's, or one of them is missing or damaged.
            OutputError: the folder cannot be written.
        """
        as_integer(options.tokens, "--shard-tokens", 1)
        if options.format == "parquet" and find_spec("pyarrow") is None:
            raise ValueError("shards of parquet need pyarrow: pip install pyarrow, or let them be safetensors")
        self._options = options
        self._folder = Path(options.folder)
        self.manifest = manifest
        self.num_shards = 0
        self._new_progress = new_progress
        self.progress = new_progress()
        if not is_file(options.folder) or self._folder.is_file():
            raise ValueError(f"the output {quote(options.folder)} must be a folder, or become one: shards go into it")
        if source.is_folder and self._folder.resolve().is_relative_to(Path(source.path).resolve()):
            raise ValueError(
                f"the output {options.folder} lies in the input {source.path}, whose files are all read as lines"
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        try:
            lock_file(self._descriptor, options.folder)
            self._begin(overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, overwrite: bool) -> None:
        """Check that the shards of earlier runs are this job's, and read what they hold; or begin anew."""
        earlier = [path for kind in SHARD_FORMATS for path in self._folder.glob(f"shard-*.{kind}")]
        try:
            while overwrite and earlier:
                earlier.pop().unlink()
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        if earlier:
            self.manifest.resume(0)
            self._find()
        else:
            self.manifest.create()

    def _find(self) -> None:
        """Read what the shards hold."""
        self.num_shards = 0
        self.progress = self._new_progress()
        for path in sorted(self._folder.glob(f"shard-*.{self._options.format}")):
            if path != self._path(self.num_shards):
                missing = self._path(self.num_shards)
                raise ValueError(f"{missing} is missing: bring it back, or give --overwrite to start anew")
            try:
                self.progress = self._new_progress(**read_metadata(path)["progress"])
            except Exception as error:  # safetensors and pyarrow have errors of their own
                raise ValueError(
                    f"{path} is no shard ({error}): remove it and all later ones, and they are made again"
                ) from error
            self.num_shards += 1

    def write(self, texts: Sequence[ScoredText], progress: Any) -> None:
        """Write the next shard, with which this progress is made. OutputError if that fails; then no part is left."""
        errors = {text.number: text.error[1] for text in texts if text.error is not None}
        facts = {"progress": vars(progress), "errors": errors, "custom_ids": [text.custom_id for text in texts]}
        metadata = {METADATA: json.dumps(facts)}  # safetensors writes several entries in any order
        path = self._path(self.num_shards)
        encode = self._encode_safetensors if self._options.format == "safetensors" else self._encode_parquet
        content = encode(texts, metadata)
        try:
            replace_file(path, content)
        except OSError as error:
            raise cannot_write(path, error) from error
        self.num_shards += 1
        self.progress = progress

    def remove_last(self) -> None:
        """Remove the last shard. OutputError if that fails."""
        path = self._path(self.num_shards - 1)
        try:
            path.unlink()
            os.fsync(self._descriptor)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._find()

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._descriptor)

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:06}.{self._options.format}"

    def _join(self, texts: Sequence[ScoredText]) -> dict[str, NDArray[Any]]:
        """Return the arrays of texts one after another, by name."""
        joined = {name: np.concatenate([getattr(text.arrays, name) for text in texts]) for name in ScoreArrays._fields}
        with np.errstate(over="ignore"):  # below float16's least number comes -inf
            joined["logprobs"] = joined["logprobs"].astype(DTYPES[self._options.logprobs_dtype])
        joined["mask"] = np.concatenate([text.mask for text in texts])
        joined["offsets"] = np.cumsum([0, *(len(text.mask) for text in texts)], dtype=np.int64)
        joined["lines"] = np.array([text.number for text in texts], np.int64)
        prompts = [text.prompt_token_ids for text in texts if text.prompt_token_ids is not None]
        if prompts:
            joined["prompt_token_ids"] = np.concatenate(prompts)
            joined["prompt_offsets"] = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
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
        prompt_offsets = arrays.pop("prompt_offsets", offsets).astype(np.int32)
        columns = {"line": pyarrow.array(arrays.pop("lines"))}
        columns["custom_id"] = pyarrow.array([text.custom_id for text in texts], pyarrow.string())
        for name, values in arrays.items():
            tokens = pyarrow.array(values.reshape(-1))
            if values.ndim > 1:
                tokens = pyarrow.FixedSizeListArray.from_arrays(tokens, self._options.top)
            own_offsets = prompt_offsets if name == "prompt_token_ids" else offsets
            columns[name] = pyarrow.ListArray.from_arrays(pyarrow.array(own_offsets), tokens)
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
