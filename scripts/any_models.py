"""Writes docs/any-model-compared.md: small random models of many architectures, beside transformers.

python scripts/any_models.py [ARCHITECTURE ...] [--attention-backend cpu]

Each model answers 9 prompts with 24 tokens each, in batches, in chunks, with prefix hits and preemption. The numbers
are those of tests/models/test_any_model.py, in float32. With names of architectures, or another backend than plain
torch, it only prints.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "any-model-compared.md"
HEAD = """# What was compared

For those who use [any causal model](any-model.md), or doubt one. `python scripts/any_models.py` wrote this page.

Small random models run through transformers' code and this engine's attention, in float32 with plain torch. They answer
9 prompts of 1 to 100 tokens with 24 tokens each: in batches, in chunks of at most 48 tokens, with prefix hits and
preemption. Windows have 20 tokens. Every token is transformers' likeliest after the same text, unless a row says
otherwise. The error is that of log-probabilities; it is rounding, so its last digit varies. transformers {version}.

Full attention sees all earlier tokens, a window the last ones. Latent keys and values are made of one short vector.
Sinks are scores that belong to no token, and a cap limits scores.

| architecture | attention and layers | largest error |
| --- | --- | ---: |
"""


def measure(name: str, backend: str) -> str:
    """Return one row: the model is loaded once, and compared with transformers."""
    from helpers.any_models import CASES, compare, save_any
    from helpers.tiny import CROWDED

    from nanovllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = save_any(Path(folder), name)
        options = CROWDED | {"attention_backend": backend, "model_impl": "transformers"}
        with LLM(folder, **options) as llm:
            found = compare(model, llm)
            stats = llm.stats()
    assert stats["num_preemptions"] and stats["num_cached_tokens"]
    error = f"{found.worst:.0e}"
    if found.num_equal < found.num_tokens:
        error += f", and {found.num_equal} of {found.num_tokens} tokens are equal"
    return f"| `{name}` | {CASES[name].kinds} | {error} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--attention-backend", default="torch")
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    import transformers
    from helpers.any_models import CASES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    rows = []
    for name in args.names or sorted(CASES):
        rows.append(measure(name, args.attention_backend))
        print(rows[-1], end="", flush=True)
    if args.names or args.attention_backend != "torch":
        return
    PAGE.write_text(HEAD.format(version=transformers.__version__) + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
