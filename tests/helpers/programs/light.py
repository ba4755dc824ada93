"""lighteval's VLLMModel: log-likelihoods and greedy texts beside transformers'."""

import json
import tempfile
from typing import Any

import torch
from lighteval.models.model_input import GenerationParameters
from lighteval.models.vllm.vllm_model import VLLMModel, VLLMModelConfig
from lighteval.tasks.requests import Doc, SamplingMethod
from reference import MODEL, complete, load

config = VLLMModelConfig(
    model_name=MODEL,
    dtype="float32",
    max_model_length=512,
    generation_parameters=GenerationParameters(temperature=0.0, seed=1),
    cache_dir=tempfile.mkdtemp(),
    override_chat_template=False,
)
model = VLLMModel(config)
docs = []
for number, (a, b) in enumerate([(1, 2), (3, 4), (7, 7)]):
    doc = Doc(f"What is {a} + {b}? Answer:", [f" {a + b}", f" {a * b} or so", " none at all"], 0, task_name="sums|0")
    doc.id = str(number)
    doc.generation_size = 8
    doc.sampling_methods = [SamplingMethod.GENERATIVE, SamplingMethod.LOGPROBS]
    docs.append(doc)
texts = [answer.text[0] for answer in model._greedy_until(docs)]
scores = model._loglikelihood_tokens(docs)
model.cleanup()
tokenizer, reference = load()


def score(context: list[int], continuation: list[int]) -> float:
    rows: Any = reference(torch.tensor([context + continuation])).logits.log_softmax(-1)[0]
    return sum(rows[len(context) - 1 + i, token].item() for i, token in enumerate(continuation))


expected = [[score(c, e) for c, e in zip(s.input_tokens, s.output_tokens, strict=True)] for s in scores]
found = {
    "scores": [list(s.logprobs) for s in scores],
    "expected_scores": expected,
    "texts": texts,
    "expected_texts": [complete(tokenizer, reference, doc.query, 8) for doc in docs],
}
print(json.dumps(found))
