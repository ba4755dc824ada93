"""Tiny checkpoints for the tests: random ones with peaked logits, and one that recites the alphabet."""

import json
import shutil
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from helpers.paths import BOX_MODEL

if TYPE_CHECKING:  # transformers' models take seconds, and some processes of tests want nothing but the options below
    from transformers import PreTrainedModel

VOCAB_SIZE = 500
BLOCK = 16
PADDING = 2
"""The token that pads texts for a model of `save_classifier`."""
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 112,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 256,
}
"""The options of a small engine. In float32 tokens are the same however they are computed."""
CROWDED = SMALL | {
    "device": "cpu",
    "max_model_len": 160,
    "num_kvcache_blocks": 24,  # room for two and a half of the longest sequences: some are preempted
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,  # long prompts are cut into chunks
}
"""The options of an engine that is too small for its requests: it preempts, and computes prompts in chunks."""
SLIDING = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
"""A configuration of a Qwen2 or Qwen3 whose layers slide, but for the first one."""
SMALL_MODEL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
"""The configuration of small random models."""


def save_random(
    folder: Path,
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    model_class: "type[PreTrainedModel] | None" = None,
    **changes: Any,
) -> "PreTrainedModel":
    """Write a random float32 model to folder and return transformers' model of it.

    Args:
        model_class: None: Qwen3ForCausalLM.
        changes: changes of its configuration; `...` leaves an entry out.

    As initialised, transformers' logits are nearly flat, biases zero and norms one: much could be lost without a token
    changing. So the layers are scaled up, beyond the embedding (which alone would make each token repeat itself), the
    last norm too, which makes the likeliest token clear (in the median 1.2 above the second), and the rest is drawn.
    """
    if model_class is None:
        from transformers import Qwen3ForCausalLM

        model_class = Qwen3ForCausalLM
    torch.manual_seed(seed)
    config = {name: value for name, value in (SMALL_MODEL | changes).items() if value is not ...}
    model = model_class(model_class.config_class(**config)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(5 if "embed" in name or "lm_head" in name else 8)
        last_norm = getattr(model.model, "norm", None) or model.model.final_layernorm
        last_norm.weight.mul_(6)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_classifier(folder: Path, kind: str, num_labels: int, **changes: Any) -> Any:
    """Write a random float32 model with a head for scores to folder, and return transformers' model of it.

    Args:
        kind: a model_type of transformers.
        changes: changes of its configuration.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}
    config = AutoConfig.for_model(kind, num_labels=num_labels, **{**sizes, "pad_token_id": PADDING, **changes})
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.normal_(1, 0.1)
    model.save_pretrained(folder)
    return model


def save_text_classifier(folder: Path, num_labels: int, **changes: Any) -> Any:
    """`save_classifier` of a Qwen3, with the built-in model's tokenizer and template."""
    sizes = {name: json.loads((BOX_MODEL / "config.json").read_text())[name] for name in ("vocab_size", "pad_token_id")}
    model = save_classifier(folder, "qwen3", num_labels, **sizes, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BOX_MODEL / name, folder)
    return model


@torch.inference_mode()
def greedy(model: "PreTrainedModel", prompt: list[int], count: int, guess: list[int] | None = None) -> list[int]:
    """Return the tokens that transformers' generate adds to a prompt.

    Args:
        guess: if each token of it is the likeliest after those before, it is the answer: one pass instead of `count`.
    """
    if guess and len(guess) == count:
        likeliest = logits_of(model, [*prompt, *guess[:-1]])[len(prompt) - 1 :].argmax(-1)
        if likeliest.tolist() == guess:
            return guess
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def greedy_all(
    model: "PreTrainedModel", prompts: list[list[int]], count: int, guesses: list[list[int]]
) -> list[list[int]]:
    """Return what `greedy` says to each prompt."""
    return [greedy(model, prompt, count, guess) for prompt, guess in zip(prompts, guesses, strict=True)]


@torch.inference_mode()
def logits_of(model: "PreTrainedModel", token_ids: list[int]) -> Tensor:
    """float32 [len(token_ids), vocab]: transformers' logits of the token after each."""
    return model(torch.tensor([token_ids])).logits[0].float()


def draw_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes a key out."""
    data = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


# ---- The reciter: the next token depends on the last one only, so that a test knows what will be said.

END = "<|end|>"
TURN = "<|turn|>"
NOTE = "<|note|>"
RECITATION = [*"abcdefghijklm", "Ã", "©", *"nopqrstuvw", "xyz", END]
"""Byte-level tokens: "Ã©" are the two bytes of "é", and "xyz" is one token."""
SPOKEN = "abcdefghijklménopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}()a{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Bytes, the token "xyz" and three special tokens; END is the tokenizer's own end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "xy", "xyz"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("x", "y"), ("xy", "z")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, TURN, NOTE)])
    return tokenizer


CYCLES = (RECITATION, [*"ABC", TURN], [*"01", NOTE, *"23"])


def save_reciter(
    folder: Path, head_dim: int = 8, cycles: Iterable[Seq[str]] = CYCLES, more_tokens: Seq[str] = ()
) -> None:
    """Write a model, with its tokenizer, that goes on as follows after any prompt that ends with the first token:

        a b c ... w xyz END a b ...     END is the tokenizer's end-of-sequence token
        A B C TURN A ...                TURN is one of generation_config.json's
        0 1 NOTE 2 3 0 ...              NOTE is special but ends nothing

    Attention and MLP add nothing (their output matrices are zero), the embedding is the identity, and the head holds
    each token's successor; every other token is followed by itself.

    Args:
        head_dim: the head_dim of its attention; the Triton kernels take 32, 64, 128 and 256.
        cycles: what to recite instead.
        more_tokens: texts that are a token each, and not special.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in more_tokens])
    size = tokenizer.get_vocab_size()
    successor = torch.arange(size)
    for cycle in cycles:
        ids = torch.tensor([tokenizer.token_to_id(token) for token in cycle])
        successor[ids] = ids.roll(-1)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        intermediate_size=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()[successor, torch.arange(size)] = 2.0
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
    )
    edit_json(folder / "generation_config.json", do_sample=False, eos_token_id=[tokenizer.token_to_id(TURN)])
