"""vLLM's parameters of requests, with its defaults."""

from dataclasses import replace
from enum import Enum
from typing import Any

import nanovllm
from nanovllm.apps.standin.names import ACCEPTED, ADVICE
from nanovllm.utils.checks import refuse_unknown
from nanovllm.utils.foreign_names import leave_out
from nanovllm.utils.vllm_names import ACCEPTED as ACCEPTED_OPTIONS

RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)
"""An AsyncLLM yields all tokens so far, the tokens since the last time, or one output at the end."""


class SamplingParams(nanovllm.SamplingParams):
    """Without max_tokens a request has 16. All fields have names, because vLLM's have another order."""

    __slots__ = ("output_kind",)  # AsyncLLM reads it
    __annotations__ = {**nanovllm.SamplingParams.__annotations__, **ACCEPTED_OPTIONS["SamplingParams"]}
    """Clients leave out, without a word, what has no name here. So the fields of vLLM's that are refused have one."""

    def __init__(self, *, output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any) -> None:
        super().__init__(**{"max_tokens": 16, **fields})
        self.output_kind = output_kind

    def clone(self) -> "SamplingParams":
        return replace(self, output_kind=self.output_kind)  # type: ignore[call-arg]


class PoolingParams:
    """vLLM's name for arguments of `embed`: `dimensions`, and `use_activation`, which is our `normalize`."""

    def __init__(self, dimensions: int | None = None, use_activation: bool | None = None, **others: Any) -> None:
        rest = leave_out(others, "PoolingParams", ACCEPTED["PoolingParams"], ADVICE)
        refuse_unknown(rest, ("dimensions", "use_activation"), "PoolingParams")
        self.dimensions = dimensions
        self.use_activation = use_activation
