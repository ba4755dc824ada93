"""Makes the workload of bench.py: the requests, and a checkpoint of random weights that every engine can load."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from nanovllm.models.model_config import load_model_config
from nanovllm.models.sizes import Sizes

WARM_UP_LEN = 1024
"""Most tokens of a prompt of the warm-up: a longer one would take as long as the run, and warm nothing more."""


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [(len(prompt), output) for prompt, output in zip(self.prompts, self.output_lens, strict=True)]

    @property
    def max_len(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    def warm_up(self, vocab_size: int, output_len: int = 4) -> "Workload":
        """Return the beginnings of all prompts, with short outputs and other tokens: no cache holds this workload."""
        ids = min(vocab_size, 10000)
        prompts = [[(token + 5003) % ids for token in prompt[:WARM_UP_LEN]] for prompt in self.prompts]
        return Workload(prompts, [min(output_len, output) for output in self.output_lens])


def make_workload(
    num_seqs: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Workload:
    """Make a workload. With bench.py's defaults it is nano-vLLM's: the same generator, drawn from in the same order.

    It draws the prompts first: the length of each, then its ids in 0..10000, modulo the vocabulary's size. Then it
    draws all output lengths, and last the shared prefix, which makes every prompt longer.
    """
    random = Random(seed)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(*input_len))] for _ in range(num_seqs)]
    output_lens = [random.randint(*output_len) for _ in range(num_seqs)]
    prefix = [random.randint(0, 10000) for _ in range(shared_prefix)]
    return Workload([[token % vocab_size for token in prefix + prompt] for prompt in prompts], output_lens)


def write_checkpoint(config: dict[str, Any], dtype: torch.dtype, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of random weights as transformers would save it, unless the folder has one.

    Matrices are normal with standard deviation 0.02, norms are one and biases zero. There is no end-of-sequence id.
    """
    from safetensors.torch import save_file

    if (folder / "model.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    model = Sizes(load_model_config(config, "the shape")).model
    tensors = {
        name: (torch.zeros if name.endswith(".bias") else torch.ones)(target.shape, dtype=dtype)
        if len(target.shape) == 1
        else torch.randn(target.shape, generator=generator).mul_(0.02).to(dtype)
        for name, target in model.weight_targets()
    }
    name = str(dtype).removeprefix("torch.")
    config = {**config, "torch_dtype": name, "dtype": name, "eos_token_id": None, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 0, "top_p": 1.0}))
    partial = folder / f"partial-{os.getpid()}"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")  # comes last, so an interrupted write leaves no checkpoint
