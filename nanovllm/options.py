"""What a type checker wants to know of `LLM(model, **options)`."""

from collections.abc import Mapping
from typing import Any, TypedDict


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields but the model; EngineConfig documents them."""

    revision: str | None
    dtype: str
    device: str
    tensor_parallel_size: int
    distributed_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    num_kvcache_blocks: int | None
    kvcache_memory_bytes: int | None
    kvcache_block_size: int | str
    enable_prefix_caching: bool
    enforce_eager: bool
    attention_backend: str
    load_format: str
    overlap: bool
    speculative_config: Mapping[str, Any] | None
    trace: str | None
    seed: int
