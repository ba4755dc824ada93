"""Outlines: text beside transformers', and outputs that have a type."""

import json
import re
from typing import Literal

import outlines
from outlines.types import Regex
from pydantic import BaseModel
from reference import MODEL, PROMPT, complete, load
from vllm import LLM, SamplingParams


class Person(BaseModel, extra="forbid"):
    name: Literal["Ann", "Bob"]
    age: Literal[3, 4]


model = outlines.from_vllm_offline(LLM(MODEL, dtype="float32"))
params = SamplingParams(temperature=0, max_tokens=120)
found = {
    "text": model(PROMPT, sampling_params=SamplingParams(temperature=0, max_tokens=12)),
    "batch": model.batch([PROMPT, "1 + 1 ="], sampling_params=SamplingParams(temperature=0, max_tokens=8)),
    "choice": model(PROMPT, Literal["yes", "no"], sampling_params=params),
    "number": re.fullmatch("[0-9]{3}", model(PROMPT, Regex("[0-9]{3}"), sampling_params=params)) is not None,
    "person": Person.model_validate_json(model(PROMPT, Person, sampling_params=params)).age,
}
reference = load()
expected = [complete(*reference, prompt, 8, chat=True) for prompt in (PROMPT, "1 + 1 =")]
found["expected"] = complete(*reference, PROMPT, 12, chat=True)
found["expected_batch"] = expected
print(json.dumps(found))
