"""The built-in model in transformers, which says what the programs beside this file must say."""

from pathlib import Path
from typing import Any

import nanovllm

MODEL = str(Path(nanovllm.__file__).parent / "assets" / "tiny-qwen3")
PROMPT = "Once upon a time"


def load() -> tuple[Any, Any]:
    """Return the tokenizer and the model, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()


def complete(tokenizer: Any, model: Any, prompt: str, count: int, *, chat: bool = False) -> str:
    """Return the greedy text of `count` tokens."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)
    tokens = model.generate(**given, max_new_tokens=count, do_sample=False)[0]
    return str(tokenizer.decode(tokens[given["input_ids"].shape[1] :], skip_special_tokens=True))
