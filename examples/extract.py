"""Turn 200 product descriptions into records: python examples/extract.py [MODEL [COUNT]].

The descriptions are made from known facts, so that each record can be compared with them. docs/structured.md has
the counts of a small model.
"""

import json
import random
import sys
import time
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

COLORS = ["black", "white", "red", "green", "blue", "silver", "brown"]
KINDS = {
    "kitchen": ["kettle", "toaster", "espresso machine", "blender"],
    "office": ["desk lamp", "stapler", "swivel chair", "label printer"],
    "garden": ["watering can", "hedge trimmer", "bird feeder", "garden hose"],
    "sports": ["yoga mat", "jump rope", "dumbbell set", "bike helmet"],
}
BRANDS = ["Nordhaus", "Löwe & Söhne", "Acme", "Kirin Works", "O'Hara", "Bjørk", "Vela"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 30},
        "product": {"type": "string", "maxLength": 40},
        "category": {"enum": list(KINDS)},
        "price": {"type": "number", "minimum": 0, "maximum": 10000},
        "colors": {"type": "array", "items": {"enum": COLORS}, "maxItems": 3},
        "in_stock": {"type": "boolean"},
        "released": {"type": "string", "format": "date"},
    },
    "required": ["brand", "product", "category", "price", "colors", "in_stock", "released"],
    "additionalProperties": False,
}
ORDER = (
    "Extract a record from the product description. Answer with JSON that has the keys brand, product, category "
    f"(one of {', '.join(KINDS)}), price (a number), colors (a list), in_stock (true or false), "
    "released (a date, YYYY-MM-DD).\n\n"
)
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August"]
MONTHS += ["September", "October", "November", "December"]


def make_facts(rng: random.Random) -> dict[str, Any]:
    category = rng.choice(list(KINDS))
    return {
        "brand": rng.choice(BRANDS),
        "product": rng.choice(KINDS[category]),
        "category": category,
        "price": rng.randrange(500, 40000, 5) / 100,
        "colors": rng.sample(COLORS, rng.randint(1, 3)),
        "in_stock": rng.random() < 0.7,
        "released": f"{rng.randint(2015, 2025)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
    }


def describe(facts: dict[str, Any], rng: random.Random) -> str:
    year, month, day = facts["released"].split("-")
    date = f"{int(day)} {MONTHS[int(month) - 1]} {year}"
    colors = " and ".join(facts["colors"])
    stock = "In stock" if facts["in_stock"] else "Currently sold out"
    said = [
        "The {brand} {product} comes in {colors} and costs ${price:.2f}. On sale since {date}. {stock}.",
        "{stock}: {product} by {brand}, {colors}. First sold {date}. Yours for {price:.2f} dollars.",
        "Since {date} {brand} has made this {product}. Colours: {colors}. {stock}. Price: ${price:.2f}",
    ]
    return rng.choice(said).format(**facts | {"date": date, "colors": colors, "stock": stock})


def read(text: str) -> dict[str, Any] | None:
    """Return the record, or None if the text is not one. The text may stand between ```json and ```."""
    try:
        record = json.loads(text.strip().removeprefix("```json").removesuffix("```"))
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() == SCHEMA["properties"].keys() else None


def main(model: str = "tiny-qwen3", count: str = "200") -> None:
    rng = random.Random(0)
    facts = [make_facts(rng) for _ in range(int(count))]
    texts = [describe(fact, rng) for fact in facts]
    conversations = [[{"role": "user", "content": ORDER + text}] for text in texts]
    llm = LLM(model, max_model_len=512, max_num_seqs=64)
    structured = StructuredOutputsParams(json=SCHEMA)
    for name, wanted in (("with the schema", structured), ("without", None)):
        start = time.perf_counter()
        outputs = llm.chat(conversations, SamplingParams(0, 200, structured_outputs=wanted))
        seconds = time.perf_counter() - start
        num_tokens = sum(len(output.token_ids) for output in outputs)
        records = [read(output.text) for output in outputs]
        bare = sum(output.text[:1] == "{" for output in outputs)
        print(f"{name}: {sum(record is not None for record in records)} of {count} answers are records, {bare} bare")
        print(f"  {num_tokens} tokens in {seconds:.1f} s; first: {outputs[0].text!r}")
        for key in facts[0]:
            right = sum(
                record is not None and record[key] == fact[key] for record, fact in zip(records, facts, strict=True)
            )
            print(f"  {key}: {right} right")
    print(f"of: {texts[0]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
