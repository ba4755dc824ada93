"""Trains the toy Qwen3 that ships with nano-vLLM from random weights, on the generated chats of `tiny_qwen3_data`.

Two idle CPU cores take about 0.8 seconds a batch; two busy ones took 75 minutes in all. At the end it prints the
accuracy table. The first command trains and measures, the second only measures:

    python scripts/train_tiny_qwen3.py
    python scripts/train_tiny_qwen3.py --eval-only
"""

import argparse
import copy
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts import tiny_qwen3_data as data

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "nanovllm" / "assets" / "tiny-qwen3"

VOCAB_SIZE = 664
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS

# The pattern is Qwen's: it splits text into words with the space before them, single digits, punctuation and white
# space.
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def train_tokenizer(rng: random.Random, conversations: int = 5000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on generated chats. The special tokens get the last ids, as in Qwen."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chats = (data.draw_conversation(rng) for _ in range(conversations))
    backend.train_from_iterator((f"{m['role']}\n{m['content']}" for chat in chats for m in chat), trainer)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a Qwen3 of 2.9 million parameters with random weights and with sampling defaults."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


IGNORED = -100  # the label of a position without loss
BATCH_SIZE = 48  # chats
ANSWER_PATTERN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Return the token ids and the labels of one chat. Only answers, each with its `<|im_end|>`, carry loss."""
    ids: list[int] = []
    labels: list[int] = []
    pieces = ANSWER_PATTERN.split(tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n"))
    for index, encoding in enumerate(tokenizer.backend_tokenizer.encode_batch(pieces)):  # answers have odd indices
        ids += encoding.ids
        labels += encoding.ids if index % 2 else [IGNORED] * len(encoding.ids)
    return ids, labels


def microbatches(rows: list[tuple[list[int], list[int]]], pad_id: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a batch into padded pieces of similar length, as (ids, labels), each [rows, length].

    Padding is on the right and attention is causal, so no attention mask is needed.
    """
    rows = sorted(rows, key=lambda row: len(row[0]), reverse=True)
    cuts = [0]
    for index, (ids, _) in enumerate(rows):
        if len(ids) < 0.7 * len(rows[cuts[-1]][0]):
            cuts.append(index)
    for start, stop in pairwise([*cuts, len(rows)]):
        length = len(rows[start][0])
        padded_ids = [ids + [pad_id] * (length - len(ids)) for ids, _ in rows[start:stop]]
        padded_labels = [labels + [IGNORED] * (length - len(labels)) for _, labels in rows[start:stop]]
        yield torch.tensor(padded_ids), torch.tensor(padded_labels)


def learning_rate_factor(step: int, steps: int, warmup: int = 100) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine decay to zero."""
    return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    steps: int,
    on_checkpoint: Callable[[], None],
) -> None:
    """Minimise the mean cross-entropy of the answer tokens with AdamW; the model stays on its device."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    average = 0.0
    for step in (progress := tqdm(range(1, steps + 1), desc="training", mininterval=2)):
        rows = [encode_conversation(tokenizer, data.draw_conversation(rng)) for _ in range(BATCH_SIZE)]
        answer_tokens = sum(label != IGNORED for _, labels in rows for label in labels)
        total = 0.0
        for ids, labels in microbatches(rows, tokenizer.pad_token_id):
            logits = model(ids.to(model.device), use_cache=False).logits[:, :-1]
            targets = labels[:, 1:].to(model.device)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / answer_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average = total if step == 1 else 0.98 * average + 0.02 * total
        progress.set_postfix(loss=f"{average:.4f}", refresh=False)
        if step % 500 == 0:
            on_checkpoint()
    model.eval()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the weights in bfloat16, the configs and the tokenizer. The model in memory does not change."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    tokenizer.save_pretrained(output)


@torch.inference_mode()
def generate_greedy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], batch_size: int = 64
) -> list[str]:
    """Return the greedy answer to each question. Questions run in left-padded batches."""
    answers: list[str] = []
    for start in range(0, len(questions), batch_size):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + batch_size]]
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
        outputs = model.generate(
            **inputs, max_new_tokens=450, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        answers += tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def measure(output: Path, device: str, size: int = 400) -> str:
    """Load the saved model, answer up to `size` questions of each skill, and return the table in Markdown."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto").to(device)
    lines = ["| skill | questions | asked | exact |", "| --- | --- | --- | --- |"]
    for skill in data.PHRASINGS:
        examples = sorted(data.evaluation_set(skill, size), key=lambda example: len(example.answer))
        answers = generate_greedy(model, tokenizer, [example.question for example in examples])
        wrong = [pair for pair in zip(examples, answers, strict=True) if not pair[0].accepts(pair[1])]
        for example, answer in wrong[:3]:
            tqdm.write(f"wrong: {example.question!r} -> {answer!r}")
        side = "held out" if skill in data.HELD_OUT_SKILLS else "as trained"
        exact = 100 * (1 - len(wrong) / len(examples))
        lines.append(f"| {skill} | {side} | {len(examples)} | {exact:.1f} % |")
    return "\n".join(lines)


CARD = """\
---
license: mit
pipeline_tag: text-generation
---

# tiny-qwen3

A toy. This Qwen3 of {parameters:.2f} million parameters ships with nano-vLLM so that the first run, the examples and
the tests need no download. It does the six things below and nothing else: it has no knowledge of the world, and any
other request gets an answer that only looks like one. Do not use it for real work.

## Figures

Exact answers under greedy decoding, with the bfloat16 weights in this folder, measured through transformers. A story
counts as exact when the grammar that it was trained on can produce it.

{table}

Questions "held out" were never trained: additions and counts by their pair of numbers, prime lists by phrasing and
limit, capitals by phrasing and country. A hash of these decides, and about one in ten is held out.

## Data

Generated by `scripts/tiny_qwen3_data.py`, nothing else: prime lists to {primes}, counting between 0 and {count},
additions of numbers to {addend}, {capitals} capitals, stories about {animals} animals from a grammar with
{stories_per_animal:,} stories for each, and one introduction. Questions come in several phrasings, in lower and upper
case; some chats have a system message or several turns.

## Training

    python scripts/train_tiny_qwen3.py --steps {steps} --seed {seed}

{steps} batches of {batch} chats in {minutes:.0f} minutes on {device}; loss on the answers only, AdamW, peak rate 2e-3.
The data are the same anywhere; the weights differ a little with the machine and its number of threads.

## Licence

MIT, like the rest of nano-vLLM.
"""


def write_card(output: Path, model: Qwen3ForCausalLM, table: str, **training: object) -> None:
    """Write the model card with the measured table and the facts of the training."""
    facts = {
        "parameters": model.num_parameters() / 1e6,
        "primes": data.MAX_PRIME_LIMIT,
        "count": data.MAX_COUNT,
        "addend": data.MAX_ADDEND,
        "capitals": len(data.CAPITALS),
        "animals": len(data.ANIMALS),
        "stories_per_animal": math.prod(map(len, data.STORY)),
        "batch": BATCH_SIZE,
    }
    (output / "README.md").write_text(CARD.format(table=table, **facts, **training), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the toy Qwen3 that ships with nano-vLLM, save it and print its accuracy table."
    )
    parser.add_argument("--steps", type=int, default=3000, help="training batches (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the model's folder (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")
    parser.add_argument("--eval-only", action="store_true", help="only measure the model in --output")
    args = parser.parse_args()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if args.eval_only:
        print(measure(args.output, device))
        return
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(rng)
    model = build_model(tokenizer).to(device)
    started = time.monotonic()
    train(model, tokenizer, rng, args.steps, lambda: save(model, tokenizer, args.output))
    minutes = (time.monotonic() - started) / 60
    save(model, tokenizer, args.output)
    table = measure(args.output, device)
    write_card(args.output, model, table, steps=args.steps, seed=args.seed, minutes=minutes, device=device)
    print(table)


if __name__ == "__main__":
    main()
