"""The Triton kernels of mixtures of experts."""

from nanovllm.backends.gpu.combine import combine
from nanovllm.backends.gpu.grouped_linear import TILES, grouped_linear
from nanovllm.backends.gpu.route import route
from nanovllm.features.families.qwen3_moe.ops import ExpertOperators


class Operators(ExpertOperators):
    """Launches our Triton kernels.

    Attributes:
        row_limits: the numbers of tokens up to which each variant of a kernel is taken. At start-up each is compiled.
    """

    row_limits = tuple(most for most, _, _ in TILES)

    route = staticmethod(route)
    grouped_linear = staticmethod(grouped_linear)
    combine = staticmethod(combine)
