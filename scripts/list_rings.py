"""Lists the imports that point outwards, and the circles of imports. Late ones count, and those for types.

python scripts/list_rings.py

A module belongs to the ring of the room that names it most exactly. It may import modules of its own ring, and of the
rings within: those before it in the table.
"""

from pathlib import Path
from typing import NamedTuple

from count_lines import PACKAGE, Import, find_imports, find_modules

RINGS = (
    ("utils", "version", "vllm_names", "config", "sampling_params", "outputs", "inputs"),
    ("text", "engine"),
    ("ops", "layers", "models", "runner", "backends"),
    ("models.qwen3_moe", "models.qwen3_5", "models.qwen3_5_moe"),
    (
        *("edits", "drafts", "quantized", "parsing", "distributed", "uses", "engine.scoring", "runner.targets"),
        *("runner.renewal", "models.lora", "models.diagnosis", "models.shapes", "models.dummy_weights"),
        *("text.conversations", "view.trace"),
    ),
    ("backends.cpu", "backends.gpu"),
    ("llm", "load"),
    ("", "__main__", "commands", "jobs", "ray", "lm_eval", "ported", "view"),
)
"""The rooms of each ring, from the innermost on: values and checks; text and planning; the model and what runs it;
families; features; devices; the engine; applications. "" is the package's own file."""


class Arrow(NamedTuple):
    """One import: of `found.module` by `module`, both without "nanovllm."."""

    module: str
    found: Import

    def __str__(self) -> str:
        kind = "for types" if self.found.is_for_types else "early" if self.found.is_early else "late"
        other = self.found.module
        return f"{self.module} ({find_ring(self.module)}) -> {other} ({find_ring(other)}), {kind}"


def find_ring(module: str) -> int:
    """Return the number of a module's ring."""
    rooms = [(len(room), i) for i, ring in enumerate(RINGS) for room in ring if f"{module}.".startswith(f"{room}.")]
    if not rooms:
        raise ValueError(f"{module} is in no ring")
    return max(rooms)[1]


def list_arrows(modules: dict[str, Path]) -> list[Arrow]:
    """Return all imports of the package's modules among themselves."""
    return [
        Arrow(shorten(module), found._replace(module=shorten(found.module)))
        for module, path in modules.items()
        for found in sorted(set(find_imports(path, modules)))
    ]


def shorten(module: str) -> str:
    """Return a module's name without that of the package."""
    return module.removeprefix("nanovllm").removeprefix(".")


def find_circles(arrows: list[Arrow]) -> list[list[str]]:
    """Return the largest sets of modules of which each one leads to each other, the largest set first."""
    imports: dict[str, set[str]] = {arrow.module: set() for arrow in arrows}
    for arrow in arrows:
        imports[arrow.module].add(arrow.found.module)

    def reach(module: str) -> frozenset[str]:
        found: set[str] = set()
        waiting = [module]
        while waiting:
            for other in imports.get(waiting.pop(), set()) - found:
                found.add(other)
                waiting.append(other)
        return frozenset(found)

    reached = {module: reach(module) for module in imports}
    circles = {frozenset(other for other in reached[module] if module in reached.get(other, ())) for module in imports}
    return sorted((sorted(circle) for circle in circles if len(circle) > 1), key=len, reverse=True)


def main() -> None:
    arrows = list_arrows(find_modules(PACKAGE))
    outward = [arrow for arrow in arrows if find_ring(arrow.found.module) > find_ring(arrow.module)]
    print(f"{len(arrows)} imports; {len(outward)} point outwards")
    for arrow in outward:
        print(f"    {arrow}")
    run = [arrow for arrow in arrows if not arrow.found.is_for_types]
    for title, some in (("those for types, too", arrows), ("those that a program runs", run)):
        print(f"circles of imports, {title}")
        for circle in find_circles(some):
            print(f"    {len(circle)}: {' '.join(circle)}")


if __name__ == "__main__":
    main()
