"""The Triton kernels of mixtures of experts."""

from torch import Tensor

from nanovllm.backends.gpu.combine import combine
from nanovllm.backends.gpu.product import PLAIN_EXPERT_TILES, Laid, limit_rows, product
from nanovllm.backends.gpu.route import route
from nanovllm.features.families.qwen3_moe.ops import ExpertOperators, Routing


class Operators(ExpertOperators):
    """Launches our Triton kernels.

    Attributes:
        row_limits: see `limit_rows`.
    """

    row_limits = limit_rows(PLAIN_EXPERT_TILES)

    route = staticmethod(route)
    combine = staticmethod(combine)

    def grouped_linear(self, x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
        laid = Laid(weight, bits=16, group_size=weight.shape[-1])
        return product(x, laid, routing=routing, gather=gather)
