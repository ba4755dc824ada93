"""Measures how long a mask of allowed tokens takes, for one sequence and for 64.

    python benchmarks/evidence/bench_masks.py FOLDER    a folder with a tokenizer

It compiles a grammar for each document. It then follows the document token by token. Before every token it makes the
mask of the tokens that may come next, and measures how long that takes. The last line is one JSON document.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm import StructuredOutputsParams
from nanovllm.features.edits.grammars import Grammars, fill_masks
from nanovllm.text.tokenizer import Tokenizer

ROUNDS = 20
ROWS = 64
STEPS = 200


def text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PRODUCT = record(
    name=text(60),
    brand=text(30),
    price={"type": "number", "minimum": 0, "maximum": 100000},
    tags={"type": "array", "items": text(20), "maxItems": 5},
    in_stock={"type": "boolean"},
    released={"type": "string", "format": "date"},
)
PERSON = record(
    name={"type": "string"},
    email={"type": "string", "format": "email"},
    age={"type": "integer", "minimum": 0, "maximum": 130},
    role={"enum": ["engineer", "manager", "analyst"]},
    address=record(street={"type": "string"}, city={"type": "string"}, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
)
CASES: list[tuple[StructuredOutputsParams, str]] = [
    (
        StructuredOutputsParams(json=PRODUCT),
        '{"name": "Löwe Espresso Machine 3000", "brand": "Löwe & Söhne", "price": 249.95, '
        '"tags": ["kitchen", "coffee", "espresso"], "in_stock": true, "released": "2024-02-29"}',
    ),
    (
        StructuredOutputsParams(json=PERSON),
        '{\n  "name": "Ada Lovelace",\n  "email": "ada@analytical.org",\n  "age": 36,\n  "role": "analyst",\n'
        '  "address": {"street": "12 St James\'s Square", "city": "London", "zip": "01843"}\n}',
    ),
    (
        StructuredOutputsParams(
            json={"type": "array", "items": record(word={"type": "string"}, count={"type": "integer"})}
        ),
        '[{"word": "the", "count": 1200}, {"word": "Straße", "count": 7}, {"word": "naïve", "count": 31}]',
    ),
    (StructuredOutputsParams(json_object=True), '{"a": [1, 2.5, {"b": null}], "note": "anything goes, it says here"}'),
    (StructuredOutputsParams(choice=["positive", "negative", "neutral", "mixed feelings"]), "mixed feelings"),
    (StructuredOutputsParams(regex=r"[A-Z][a-z]+ [A-Z][a-z]+, born [0-9]{4}"), "Ada Lovelace, born 1815"),
]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of some times, in microseconds."""
    values = 1e6 * np.array(seconds)
    found = {"median": np.median(values), "p99": np.percentile(values, 99), "most": values.max()}
    return {name: round(float(value), 1) for name, value in found.items()}


def read_processor() -> str:
    """Return the processor's name, as Linux knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main(folder: str) -> None:
    tokenizer = Tokenizer(Path(folder))
    data = json.loads((Path(folder) / "config.json").read_text())
    since = time.perf_counter()
    grammars = Grammars(tokenizer, data["vocab_size"], [tokenizer.transformers.eos_token_id or 0])
    results: dict[str, Any] = {"processor": read_processor(), "vocabulary": data["vocab_size"]}
    results["tokenizer_s"] = round(time.perf_counter() - since, 2)
    masks = np.zeros((ROWS, -(-data["vocab_size"] // 32)), np.int32)
    compiling = []
    alone = []
    together = []
    documents = []
    for params, document in CASES:
        since = time.perf_counter()
        compiled = grammars.compile(params)
        compiling.append(time.perf_counter() - since)
        token_ids = tokenizer.encode_batch([document], add_special_tokens=False)[0]
        documents.append((compiled, token_ids))
        for _ in range(ROUNDS):
            matcher = compiled.deep_copy()
            for token_id in token_ids:
                since = time.perf_counter()
                fill_masks(masks, [(matcher, 0, [])])
                alone.append(time.perf_counter() - since)
                assert matcher.consume_token(token_id), matcher.get_error()
            assert matcher.is_accepting()
        print(f"{document[:40]!r}: {percentiles(alone[-ROUNDS * len(token_ids) :])}")
    places = [
        (compiled.deep_copy(), iter(ids)) for compiled, ids in (documents[i % len(documents)] for i in range(ROWS))
    ]
    for _ in range(STEPS):
        since = time.perf_counter()
        fill_masks(masks, [(matcher, i, []) for i, (matcher, _) in enumerate(places)])
        together.append((time.perf_counter() - since) / ROWS)
        for i, (matcher, ids) in enumerate(places):
            if (token_id := next(ids, None)) is not None:
                assert matcher.consume_token(token_id)
            else:  # the next request
                compiled, token_ids = documents[i % len(documents)]
                places[i] = compiled.deep_copy(), iter(token_ids)
    results |= {"compile_us": percentiles(compiling), "one_row_us": percentiles(alone)}
    results["64_rows_us_a_row"] = percentiles(together)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
