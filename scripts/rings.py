"""Shows the rings of the package, the imports that point outwards, and the largest circle of imports.

python scripts/rings.py [FOLDER_OF_THE_PACKAGE]

A module may import what lies in its own ring or further in. Imports within functions, and imports for types alone,
count like all others. docs/architecture.md prints the table, and tests/docs/test_rings.py holds the rule.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import networkx

if __package__:
    from scripts.count_lines import PACKAGE, find_imports, find_modules
else:
    from count_lines import PACKAGE, find_imports, find_modules

VALUES, PLANNING, MODEL, FAMILIES, FEATURES, DEVICES, FACE, APPLICATIONS = range(8)
NAMES = ("values", "planning", "the model", "families", "features", "devices", "the face", "applications")
"""The contents of each ring, from the innermost outwards."""

RINGS = {
    "utils": VALUES,
    "version": VALUES,
    "inputs": VALUES,
    "outputs": VALUES,
    "sampling_params": VALUES,
    "config": VALUES,
    "text": PLANNING,
    "engine": PLANNING,
    "ops": MODEL,
    "models": MODEL,
    "backends": MODEL,
    "runner": MODEL,
    "features/families": FAMILIES,
    "features": FEATURES,
    "backends/cpu": DEVICES,
    "backends/gpu": DEVICES,
    "load": FACE,
    "llm": FACE,
    "__init__": APPLICATIONS,
    "apps": APPLICATIONS,
    "__main__": APPLICATIONS,
    "as_vllm": APPLICATIONS,
    "lm_eval": APPLICATIONS,
    "ray": APPLICATIONS,
}
"""The ring of each folder or loose file. The longest path that fits a module counts."""

EXCEPTIONS = {
    # The program of another process puts an engine together there, as the caller's process does here.
    ("features/distributed/replica", "load"),
    ("features/distributed/worker", "load"),
}
"""The imports that may point outwards: (importing module, imported module)."""


def find_place(module: str) -> str:
    """Return a module's path within the package, without `.py`."""
    return module.removeprefix("nanovllm").removeprefix(".").replace(".", "/") or "__init__"


def find_ring(place: str) -> int:
    """Return the ring of a module's path."""
    fitting = [path for path in RINGS if f"{place}/".startswith(f"{path}/")]
    return RINGS[max(fitting, key=len)]


def find_arrows(package: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """Yield (importing module, imported module) for every import of the package, as paths."""
    modules = find_modules(package)
    for module, file in modules.items():
        for found in find_imports(file, modules):
            yield find_place(module), find_place(found.module)


def find_outward_arrows(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Return the arrows that point outwards."""
    return {(start, end) for start, end in find_arrows(package) if find_ring(end) > find_ring(start)}


def find_largest_circle(package: Path = PACKAGE) -> set[str]:
    """Return the largest set of modules each of which imports all others, by way of others of the set.

    `import nanovllm` loads the face when it is asked for, so the package itself is no part of a circle.
    """
    arrows = [arrow for arrow in find_arrows(package) if "__init__" not in arrow]
    circles = networkx.strongly_connected_components(networkx.DiGraph(arrows))
    return max(circles, key=len)


def write_table() -> str:
    """Write the rings as a table in Markdown."""
    lines = ["| folder or file | ring | |", "| --- | ---: | --- |"]
    for path, ring in RINGS.items():
        lines.append(f"| `{path}` | {ring} | {NAMES[ring]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=PACKAGE)
    package = parser.parse_args().package.resolve()
    print(write_table())
    print(f"\n{len(list(find_arrows(package)))} imports")
    outward = sorted(find_outward_arrows(package))
    print(f"{len(outward)} point outwards:", *(f"    {start} -> {end}" for start, end in outward), sep="\n")
    circle = find_largest_circle(package)
    print(f"the largest circle has {len(circle)} modules:", *(f"    {module}" for module in sorted(circle)), sep="\n")


if __name__ == "__main__":
    main()
