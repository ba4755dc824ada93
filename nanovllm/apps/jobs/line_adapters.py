"""The LoRA adapters that the lines of a job name: see features/adapters/groups.py."""

from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING

from nanovllm.apps.jobs.request_lines import LineError, RequestLine
from nanovllm.utils.checks import refuse

if TYPE_CHECKING:
    from nanovllm.features.adapters.groups import Adapters, Named
    from nanovllm.llm import LLM


class LineAdapters:
    """Brings the adapter of each line into the engine's weights, before its requests run."""

    def __init__(
        self,
        llm: "LLM",
        note: Callable[[Mapping[str, str]], None] = lambda found: None,
        earlier: Container[str] = (),
        are_allowed: bool = True,
    ) -> None:
        """
        Args:
            note: is called with {folder: digest} before the first line that names an adapter.
            earlier: the folders of the adapters that earlier answers had.
            are_allowed: False with --ray.
        """
        self._llm = llm
        self._note = note
        self._earlier = earlier
        self._are_allowed = are_allowed
        self._adapters: Adapters | None = None
        """None until a line has named an adapter."""
        self._found: dict[str | None, Named | str] = {}
        """{folder: its adapter, or why there is none}."""

    def change(self, line: RequestLine) -> Iterator[None]:
        """Bring the adapter of a line into the weights, and yield None until that can be done.

        Once a line has had an adapter, lines without one bring back the model as it was loaded.

        Raises:
            LineError: the adapter is bad.
            RuntimeError: the adapter is bad, and earlier answers had it: the line can be answered when it is mended.
        """
        folder = line.body.get("lora")
        if folder is None and self._adapters is None:
            return
        if folder not in self._found:
            self._found[folder] = self._find(folder)
        if isinstance(found := self._found[folder], str):
            raise LineError("invalid_request", found, line.custom_id)
        assert self._adapters is not None
        yield from self._adapters.change(found)

    def _find(self, folder: str | None) -> "Named | str":
        from nanovllm.features.adapters.groups import BASE, find_adapters

        if folder is None:
            return BASE
        try:
            if not self._are_allowed:
                raise refuse(folder, "lora", "left out with --ray, whose engines answer several parts at once")
            adapters = find_adapters(self._llm, "lora")
            found = adapters.find(folder, "lora")
        except ValueError as error:
            if folder in self._earlier:
                raise RuntimeError(f"an adapter that earlier answers had cannot be read any more: {error}") from error
            return str(error)
        self._note({folder: found.root.hex()})
        self._adapters = adapters
        return found
