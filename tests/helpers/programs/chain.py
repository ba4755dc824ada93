"""langchain's VLLM: greedy text beside transformers', stop strings, a batch, and an option that it may not lose."""

import json

from langchain_community.llms import VLLM
from reference import MODEL, PROMPT, complete, load

llm = VLLM(model=MODEL, max_new_tokens=12, temperature=0, dtype="float32", trust_remote_code=True)
found = {"text": llm.invoke(PROMPT), "batch": llm.batch([PROMPT, "1 + 1 ="])}
found["stopped"] = llm.generate([PROMPT], stop=[found["text"][-1]]).generations[0][0].text
try:
    llm.invoke(PROMPT, best_of=4)
except ValueError as error:
    found["refused"] = str(error)
reference = load()
found["expected"] = [complete(*reference, prompt, 12) for prompt in (PROMPT, "1 + 1 =")]
print(json.dumps(found))
