"""llama-index's Vllm: greedy text beside transformers'."""

import json

from llama_index.llms.vllm import Vllm
from reference import MODEL, PROMPT, complete, load

llm = Vllm(model=MODEL, max_new_tokens=12, temperature=0, dtype="float32", vllm_kwargs={"max_model_len": 256})
print(json.dumps({"text": llm.complete(PROMPT).text, "expected": complete(*load(), PROMPT, 12)}))
