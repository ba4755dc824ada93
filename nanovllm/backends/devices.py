"""The truth about each type of device, before a backend is chosen. A `Backend` has all that it does on its device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceType:
    """The properties of the devices that torch calls by one name, such as "cuda".

    Attributes:
        backends: the backends that attention_backend="auto" tries, the best first.
        has_float16: whether dtype="auto" keeps the float16 of a model.
        has_bfloat16: returns whether a device computes bfloat16 in hardware.
        runs_beside_host: whether the host is free while the device works. Then steps overlap, and may become graphs.
        measured: the bytes that are copied and read to measure a device, and the sizes m, n and k of a product.
    """

    backends: tuple[str, ...]
    has_float16: bool
    has_bfloat16: Callable[[torch.device], bool]
    runs_beside_host: bool
    measured: tuple[int, tuple[int, int, int]]


def _has_bfloat16_on_gpu(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _has_bfloat16_on_cpu(device: torch.device) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


DEVICES = {
    "cuda": DeviceType(
        backends=("triton", "flash_attn", "torch"),
        has_float16=True,
        has_bfloat16=_has_bfloat16_on_gpu,
        runs_beside_host=True,
        measured=(4 << 30, (8192, 8192, 8192)),
    ),
    "cpu": DeviceType(
        backends=("cpu", "torch"),
        has_float16=False,
        has_bfloat16=_has_bfloat16_on_cpu,
        runs_beside_host=False,
        measured=(512 << 20, (2048, 6144, 1024)),
    ),
}
"""By torch's name of the type. device="auto" takes the first of which there is one."""
