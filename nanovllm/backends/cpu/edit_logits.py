"""The C++ kernel that edits logits."""

from torch import Tensor

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.features.edits.edit_logits import EditOperators, MaskAndPenalties


class Operators(EditOperators):
    """Calls the kernel of the CPU backend's library."""

    def __init__(self, backend: CpuBackend) -> None:
        self._library = backend.library

    def edit_logits(self, logits: Tensor, edits: MaskAndPenalties) -> None:
        self._library.call("edit_logits", logits.dtype, logits, *edits, len(edits.indices), logits.shape[1])
