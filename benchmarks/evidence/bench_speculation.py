"""Measures how much time drafts from the text save: it runs the same requests with and without them, in turn.

    python benchmarks/evidence/bench_speculation.py edit --model FOLDER
    python benchmarks/evidence/bench_speculation.py extract --model FOLDER
    python benchmarks/evidence/bench_speculation.py chat --model FOLDER --batch 32
    python benchmarks/evidence/bench_speculation.py itself --model tiny-qwen3

`edit` returns files with one name changed, `extract` turns records into JSON, and in `itself` the model drafts for
itself, which shows where time goes.

Without --batch, both engines answer one request after another, in changing order. A pair is one request, and the index
of drafts keeps growing from request to request, as in a batch job. With --batch, a pair runs all requests at once, and
each run starts with an empty index and no cached prefixes; there are --repeat pairs. The tokens of both engines are
compared. The last line is one JSON document.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measuring import commit
from nanovllm import LLM, SamplingParams
from nanovllm.engine.plan import StepPlan
from nanovllm.features.drafts.costs import StepCosts
from nanovllm.features.drafts.speculation import start_speculation
from nanovllm.utils.clock import Clock

FILES = ("bisect", "heapq", "textwrap", "shlex", "fnmatch", "queue", "sched", "colorsys")
"""Modules of Python's library; `edit` asks for a change in the source of each."""
NAMES = ("Maria Silva", "John Carter", "Aiko Tanaka", "Lars Olsen", "Priya Nair", "Tom Becker", "Ana Costa", "Li Wei")
CITIES = ("Lisbon", "Denver", "Osaka", "Bergen", "Kochi", "Hamburg", "Recife", "Chengdu", "Turin", "Leeds")
ITEMS = ("desk lamp", "office chair", "water filter", "bicycle pump", "tea kettle", "wool blanket", "garden hose")
KEYS = ("customer", "city", "date", "item", "quantity", "unit_price", "currency", "payment_method")
QUESTIONS = (
    "Why is the sky blue?", "Suggest a name for a small bakery, and say why.", "What is a hash table good for?",
    "Tell a story of four sentences about a lighthouse.", "How do vaccines work?", "What makes bread rise?",
    "Explain recursion to a child.", "Compare trains and planes for a trip of 500 km.", "What is inflation?",
    "Write a haiku about rain.", "How would you learn to play chess?", "What did the printing press change?",
    "Give three tips for better sleep.", "Why do leaves change colour in autumn?", "What is a black hole?",
    "How does a refrigerator work?", "Describe the taste of coffee to someone who never had any.",
    "What should one look for in a used bicycle?", "Explain the difference between weather and climate.",
    "Plan a weekend in Rome.", "What is the point of unit tests?", "How are mountains formed?",
    "Write an opening line for a detective novel.", "Why do cats purr?", "What is entropy?",
    "How does one make a good soup?", "What are the rules of offside in football?", "Explain what an API is.",
    "What is the best way to say no politely?", "Why was the bridge at Tacoma Narrows destroyed?",
    "How do noise-cancelling headphones work?", "What would happen if the moon were gone?",
)  # fmt: skip

Conversation = list[dict[str, str]]


def make_edits(count: int) -> list[Conversation]:
    """Make requests of 60 lines of code each, in which the model is to change one name."""
    conversations = []
    for name in FILES[:count]:
        source = Path(__import__(name).__file__ or "").read_text().splitlines()
        start = next(i for i, line in enumerate(source) if line.startswith(("def ", "class ")))
        old = source[start].split()[1].split("(")[0].rstrip(":")
        text = "\n".join(source[start : start + 60])
        ask = f"Change the name `{old}` to `{old}_new` in this file, and return the whole file, nothing else."
        conversations.append([{"role": "user", "content": f"{ask}\n```python\n{text}\n```"}])
    return conversations


def make_extractions(count: int) -> list[Conversation]:
    """Make requests with one short record each, which the model is to turn into JSON."""
    rng = random.Random(0)
    conversations = []
    for _ in range(count):
        record = (
            f"On {rng.randint(1, 28)} {rng.choice(('March', 'May', 'July'))} {rng.randint(2019, 2025)} "
            f"{rng.choice(NAMES)} from {rng.choice(CITIES)} ordered {rng.randint(1, 9)} x {rng.choice(ITEMS)} at "
            f"{rng.randint(5, 90)}.{rng.randint(10, 99)} {rng.choice(('EUR', 'USD', 'JPY'))} each and paid by "
            f"{rng.choice(('card', 'bank transfer', 'cash'))}."
        )
        keys = ", ".join(f'"{key}"' for key in KEYS)
        ask = f"Extract the record as one JSON object with the keys {keys}. Answer with JSON alone.\nRecord: {record}"
        conversations.append([{"role": "user", "content": ask}])
    return conversations


def make_chats(count: int) -> list[Conversation]:
    return [[{"role": "user", "content": question}] for question in (QUESTIONS * 8)[:count]]


WORKLOADS = {
    "edit": (make_edits, 8, 1000, 0.0),
    "extract": (make_extractions, 200, 120, 0.0),
    "chat": (make_chats, 32, 80, 0.7),
}
"""The function that makes the requests, their number, max_tokens and temperature."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("workload", choices=[*WORKLOADS, "itself"])
    add("--model", required=True)
    add("--dtype", default="bfloat16")
    add("--num-drafts", type=int, default=8, metavar="N")
    add("--lookup", type=int, nargs=2, default=[2, 4], metavar=("MIN", "MAX"))
    add("--batch", type=int, default=0, metavar="N", help="N requests at a time; default: one after another")
    add("--repeat", type=int, default=3, help="number of pairs, with --batch")
    add("--first", type=int, default=0, metavar="N", help="leave out the first N requests")
    add("--count", type=int, metavar="N", help="number of requests")
    add("--max-tokens", type=int, metavar="N")
    return parser.parse_args()


def forget(llm: LLM) -> None:
    """Reset an engine: no cached prefixes, an empty index of drafts, no learnt costs."""
    llm.engine.scheduler.block_manager.forget_all()
    if llm.engine.scheduler.speculation is not None:
        llm.engine.scheduler.speculation = start_speculation(llm.engine.config, llm.engine.runner, llm.engine.scheduler)


def run_timed(llm: LLM, conversations: list[Conversation], params: list[SamplingParams]) -> tuple[float, Any]:
    """Answer the conversations. Return the seconds, and the engine's counts of this run with all tokens."""
    before = llm.stats()
    since = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=False)
    seconds = time.perf_counter() - since
    after = llm.stats()
    return seconds, {name: after[name] - before[name] for name in after} | {"tokens": [o.token_ids for o in outputs]}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    make, count, max_tokens, temperature = WORKLOADS[args.workload]
    conversations = make(args.first + (args.count or count))[args.first :]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=args.max_tokens or max_tokens)
        for i in range(len(conversations))
    ]
    config = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), args.lookup, strict=True))
    options = {"dtype": args.dtype, "attention_backend": "cpu", "kvcache_memory_bytes": 1 << 30}
    options |= {"max_num_seqs": args.batch or 1}
    config |= {"method": "ngram", "num_speculative_tokens": args.num_drafts}
    engines = {"without": LLM(args.model, **options), "with": LLM(args.model, **options, speculative_config=config)}
    units = [(conversations, params)] * args.repeat
    if not args.batch:
        units = [([one], [param]) for one, param in zip(conversations, params, strict=True)]
    for llm in engines.values():
        run_timed(llm, [[{"role": "user", "content": "Hello!"}]], [SamplingParams(max_tokens=8)])
        forget(llm)
    pairs: list[dict[str, float]] = []
    totals = {"num_generated_tokens": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "num_steps": 0}
    same = True
    for i, unit in enumerate(units):
        runs = {}
        for name in sorted(engines, reverse=i % 2 == 0):
            if args.batch:
                forget(engines[name])
            runs[name] = run_timed(engines[name], *unit)
        same &= runs["with"][1]["tokens"] == runs["without"][1]["tokens"]
        pairs.append({name: seconds for name, (seconds, _) in runs.items()})
        totals = {name: total + runs["with"][1][name] for name, total in totals.items()}
        ratio = pairs[-1]["without"] / pairs[-1]["with"]
        made = runs["with"][1]
        print(
            f"{i:3d}  {made['num_generated_tokens']:5d} tokens  without {pairs[-1]['without']:7.2f} s  "
            f"with {pairs[-1]['with']:7.2f} s  {ratio:5.2f}x  accepted {made['num_accepted_tokens']:5d} of "
            f"{made['num_draft_tokens']:5d}",
            flush=True,
        )
    ratios = [pair["without"] / pair["with"] for pair in pairs]
    seconds = {name: sum(pair[name] for pair in pairs) for name in engines}
    drafted, accepted, generated = (totals[f"num_{name}_tokens"] for name in ("draft", "accepted", "generated"))
    costs = engines["with"].engine.scheduler.speculation.costs
    return {
        "row_ms": dict(
            zip(costs.num_tokens.astype(int).tolist(), (1000 * costs.verified).round(1).tolist(), strict=True)
        ),
        "same_tokens": same,
        "seconds": seconds,
        "ratio_of_all": seconds["without"] / seconds["with"],
        "median_ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "acceptance": accepted / max(drafted, 1),
        "tokens_a_step": generated / (generated - accepted),
        **totals,
    }


class TimedRunner:
    """Launches a drafter's steps on the runner, and adds up the seconds that this takes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.seconds = 0.0

    def launch(self, plan: StepPlan) -> Any:
        since = time.perf_counter()
        handle = self._runner.launch(plan)  # on a CPU this also runs the step
        self.seconds += time.perf_counter() - since
        return handle


def measure_self_drafting(args: argparse.Namespace) -> dict[str, Any]:
    """Measure where time goes if a model drafts for itself, greedy and sampled. All drafts are verified."""
    config = {"model": args.model, "num_speculative_tokens": args.num_drafts}
    options = {"dtype": args.dtype, "attention_backend": "cpu", "kvcache_memory_bytes": 1 << 28}
    llm = LLM(args.model, **options, max_num_seqs=args.batch or 32, speculative_config=config)
    speculation = llm.engine.scheduler.speculation
    speculation.costs = StepCosts(np.array([1.0, 1e9]), np.ones(2), np.ones(2), np.zeros(2))
    runner = speculation.drafter._runner = TimedRunner(llm.engine.runner.draft)
    spans: Counter[str] = Counter()
    llm.observe(SpanCounter(spans))
    result = {}
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=args.max_tokens or 128, ignore_eos=True)
            for i in range(args.count or 32)
        ]
        for _ in range(2):  # the first run warms up
            llm.engine.scheduler.block_manager.forget_all()
            spans.clear()
            runner.seconds = 0.0
            seconds, made = run_timed(llm, make_chats(len(params)), params)
        drafting = runner.seconds
        verifying = spans["launch"] + spans["wait"]
        result[f"temperature {temperature}"] = {
            "acceptance": made["num_accepted_tokens"] / made["num_draft_tokens"],
            "num_draft_tokens": made["num_draft_tokens"],
            "steps": made["num_steps"],
            "seconds": seconds,
            "draft": drafting / seconds,
            "verification": verifying / seconds,
            "host": 1 - (drafting + verifying) / seconds,
            "host_in_steps": (spans["schedule"] + spans["draft"] - drafting + spans["update"]) / seconds,
        }
    return result


class SpanCounter:
    """Observes an engine and adds up the seconds of its clocks by name."""

    def __init__(self, spans: "Counter[str]") -> None:
        self._spans = spans

    def planned(self, *_: object) -> None:
        pass

    def finished(self, _number: int, _batch: object, clock: Clock, _result: object) -> None:
        for name, _, seconds in clock.spans:
            self._spans[name] += seconds

    def close(self) -> None:
        pass


def main() -> None:
    args = parse_arguments()
    if args.workload == "itself":
        result = measure_self_drafting(args)
        for name, values in result.items():
            print(name, {key: round(value, 4) for key, value in values.items()})
        print(json.dumps({"benchmark": "speculation", "commit": commit(), "arguments": vars(args), **result}))
        return
    result = compare(args)
    print(
        f"{result['ratio_of_all']:.2f}x of all, median {result['median_ratio']:.2f}x; "
        f"{result['acceptance']:.1%} of drafts accepted, {result['tokens_a_step']:.2f} tokens a step; "
        + ("the same tokens" if result["same_tokens"] else "OTHER TOKENS")
    )
    print(json.dumps({"benchmark": "speculation", "commit": commit(), "arguments": vars(args), **result}))


if __name__ == "__main__":
    main()
