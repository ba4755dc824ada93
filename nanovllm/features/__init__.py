"""Features: what the engine can do beside generating tokens. Deleting one of them deletes that feature alone.

An import of a deleted feature says so, wherever it stands.
"""

import sys
from collections.abc import Sequence
from types import ModuleType


class DeletedFeature:
    """The last finder of modules, which Python asks for a module that no other finder has."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise a ModuleNotFoundError that names the feature, if the module is one of a feature."""
        if name.startswith(f"{__name__}."):
            place = name.removeprefix(f"{__name__}.").replace(".", "/")
            raise ModuleNotFoundError(f"this build has no {place}: there is no nanovllm/features/{place}", name=name)


sys.meta_path.append(DeletedFeature)
