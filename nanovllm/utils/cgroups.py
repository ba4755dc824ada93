"""Finds the control groups of this process: Linux and containers limit by them what it may use."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def list_cgroups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) of the groups that may limit this process: its own, and those around it.

    Each line of /proc/self/cgroup is ID:CONTROLLERS:PATH, without controllers for version 2. Within a container the
    path may be the host's; the container then sees its own cgroup as the root. See the kernel's cgroup-v2.rst and
    cgroup-v1/cgroups.rst.

    Args:
        controller: the kind of limit, "cpu" or "memory".
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator or (controllers and controller not in controllers.split(",")):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        inner = Path(path.strip("/"))
        for folder in (inner, *inner.parents):
            yield root / folder, 1 if controllers else 2
