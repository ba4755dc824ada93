"""Let a small random model learn from the shards of `nanovllm teach`, in a plain loop of torch: its loss falls.

nanovllm teach -i texts.jsonl -o shards --model tiny-qwen3 && python examples/distil.py shards
"""

import argparse
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM


def read_texts(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the arrays of each line: `token_ids`, `token_logprobs`, `ids`, `logprobs` and `mask`.

    Shards of `run-batch` have generated tokens. The prompt is put before them, and does not count.
    """
    for path in sorted(folder.glob("shard-*.safetensors")):
        shard = load_file(path)
        prompts = [shard["token_ids"][:0]] * len(shard.pop("lines"))
        if "prompt_offsets" in shard:
            prompts = torch.tensor_split(shard.pop("prompt_token_ids"), shard.pop("prompt_offsets")[1:-1])
        for prompt, (start, end) in zip(prompts, pairwise(shard.pop("offsets").tolist()), strict=True):
            text = {name: values[start:end] for name, values in shard.items()}
            for name, values in text.items():
                text[name] = torch.cat([values.new_zeros(len(prompt), *values.shape[1:]), values])
            text["token_ids"][: len(prompt)] = prompt
            yield text


def compute_loss(student: Qwen3ForCausalLM, text: dict[str, Tensor]) -> Tensor:
    """Return the teacher's likeliest tokens' share of the Kullback-Leibler divergence, the mean of what counts."""
    mask = text["mask"]
    # The student says of token i, by its logits at token i - 1, what the teacher says in row i.
    expected = student(text["token_ids"].long()[None]).logits[0].log_softmax(-1).roll(1, 0)
    found = expected[mask].gather(1, text["ids"][mask].long())
    logprobs = text["logprobs"][mask].float()
    return (logprobs.exp() * (logprobs - found)).sum(1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    texts = [text for text in read_texts(args.shards) if text["mask"].any()]
    vocab_size = 1 + max(int(text[name].max()) for text in texts for name in ("ids", "token_ids"))
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    student = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, tie_word_embeddings=True, **sizes, **heads))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    draw = random.Random(0)
    for step in range(args.steps):
        loss = torch.stack([compute_loss(student, text) for text in draw.choices(texts, k=8)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
