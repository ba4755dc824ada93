"""Compares this engine with transformers on a real model: GSM8K by lm-evaluation-harness's `hf` and by ours.

    python scripts/real_model.py Qwen/Qwen3-0.6B                    # needs the hub, or folders of model and data
    python scripts/real_model.py FOLDER --limit 50 --dtype float32
    python scripts/real_model.py FOLDER --include-path TASKS --tasks mine

Both get the same prompts and choose the likeliest token. It prints each score, how many answers are the same text, and
the tokens and seconds of each. In float32 nearly all answers should be equal; in bfloat16 close logits may swap, and so
answers differ while scores agree. Needs `pip install lm_eval`.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))


class Measured(NamedTuple):
    """Holds what one backend made of the tasks."""

    scores: dict[tuple[str, str], float]
    """By task and metric."""
    answers: list[str]
    """The generated texts, in the harness's order."""
    num_tokens: int
    """The tokens of these texts."""
    seconds: float
    """The time of the evaluation, without that of loading the model."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    columns = {"hf": evaluate(make_hf, options), "ours": evaluate(make_ours, options)}
    print(describe(columns))


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or an id of the hub")
    parser.add_argument("--tasks", nargs="+", default=["gsm8k"], help="tasks of the harness (default: gsm8k)")
    parser.add_argument("--include-path", help="a folder of tasks, in place of the harness's own")
    parser.add_argument("--limit", type=int, help="so many questions of each task (default: all)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--max-length", type=int, default=4096, help="most tokens of a question and its answer")
    parser.add_argument("--batch-size", type=int, default=8, help="questions at a time in transformers")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    return parser.parse_args(arguments)


def make_hf(options: argparse.Namespace) -> Any:
    """Return the harness's own backend, which is transformers."""
    from lm_eval.models.huggingface import HFLM

    sizes = {"max_length": options.max_length, "batch_size": options.batch_size}
    return HFLM(options.model, dtype=options.dtype, device=options.device, **sizes)


def make_ours(options: argparse.Namespace) -> Any:
    """Return this engine as a backend of the harness."""
    from nanovllm.lm_eval import NanoVLLM

    return NanoVLLM(options.model, dtype=options.dtype, device=options.device, max_model_len=options.max_length)


def evaluate(make: Callable[[argparse.Namespace], Any], options: argparse.Namespace) -> Measured:
    """Run the tasks with one backend, and let go of its model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.include_path, include_defaults=options.include_path is None)
    model = make(options)
    begin = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=options.tasks,
        task_manager=manager,
        limit=options.limit,
        apply_chat_template=options.chat,
        gen_kwargs={"do_sample": False, "temperature": 0.0},
        log_samples=True,
        bootstrap_iters=0,
    )
    seconds = time.perf_counter() - begin
    answers = [
        sample["resps"][0][0]
        for task in sorted(found["samples"])
        for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        if isinstance(sample["resps"][0][0], str)
    ]
    scores = {
        (task, metric): value
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    num_tokens = sum(len(model.tok_encode(answer, add_special_tokens=False)) for answer in answers)
    if hasattr(model, "llm"):
        model.llm.close()
    del model
    gc.collect()
    return Measured(scores, answers, num_tokens, seconds)


def describe(columns: dict[str, Measured]) -> str:
    """Return a table with a column for each backend, and what is equal."""
    lines = [("", *columns)]
    hf, ours = columns.values()
    for task, metric in sorted(hf.scores):
        cells = [f"{one.scores[task, metric]:.4f}" for one in (hf, ours)]
        lines.append((f"{task}: {metric}", *cells))
    lines.append(("tokens of the answers", f"{hf.num_tokens:,}", f"{ours.num_tokens:,}"))
    lines.append(("seconds", f"{hf.seconds:.1f}", f"{ours.seconds:.1f}"))
    table = [f"{name:<44}{first:>12}{second:>12}" for name, first, second in lines]
    different = [i for i, pair in enumerate(zip(hf.answers, ours.answers, strict=True)) if pair[0] != pair[1]]
    table.append(f"{len(hf.answers) - len(different)} of {len(hf.answers)} answers are the same text")
    if different:
        table.append(f"the first that differs is answer {different[0]}:")
        table += [f"  {name}: {one.answers[different[0]]!r}" for name, one in columns.items()]
    return "\n".join(table)


if __name__ == "__main__":
    main()
