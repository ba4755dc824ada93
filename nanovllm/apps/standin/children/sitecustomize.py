"""Python runs this file when a process begins whose parent has this engine as `vllm`: PYTHONPATH has its folder."""

import sys
from importlib import machinery, util
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))
# The parent's nanovllm, which need not lie in this process's path; and the sitecustomize that this file hides, if any.
for name, path in {"nanovllm": [str(Path(__file__).parents[4])], "sitecustomize": sys.path}.items():
    if (spec := machinery.PathFinder.find_spec(name, path)) and spec.loader:
        sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])

from nanovllm.apps.standin.finders import FINDER  # noqa: E402

sys.meta_path.insert(0, FINDER)
