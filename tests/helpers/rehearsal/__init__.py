"""A rehearsal of what only CUDA reaches, on the CPU.

`rehearse` replaces torch.cuda's functions by stand-ins. Tensors that are asked for on "cuda" lie in the host's memory
and say that they are on the card (`card.py`). Memory is counted (`memory.py`); streams and events keep order
(`timeline.py`); graphs note work and do it again (`graphs.py`). Triton's kernels run in its interpreter
(`interpreter.py`), collectives over gloo (`nccl.py`), and followers have the same stand-ins (`follower.py`).
"""

from helpers.rehearsal.cuda import rehearse
from helpers.rehearsal.timeline import RehearsalError

__all__ = ["RehearsalError", "rehearse"]
