"""distilabel's vLLM in a pipeline, whose steps are processes of their own; and by itself, with n and logprobs."""

import json

from distilabel.models import vLLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration
from reference import MODEL, PROMPT, complete, load

PROMPTS = [PROMPT, "1 + 1 ="]


def make(**generation: object) -> vLLM:
    return vLLM(
        model=MODEL,
        dtype="float32",
        extra_kwargs={"max_model_len": 512},
        disable_cuda_device_placement=True,
        generation_kwargs={"max_new_tokens": 8, **generation},
    )


if __name__ == "__main__":
    with Pipeline("answers") as pipeline:
        LoadDataFromDicts(data=[{"instruction": prompt} for prompt in PROMPTS]) >> TextGeneration(
            llm=make(temperature=0.0)
        )
    rows = pipeline.run(use_cache=False)["default"]["train"]
    found = {"texts": dict(zip(rows["instruction"], rows["generation"], strict=True))}
    llm = make()
    llm.load()
    messages = [[{"role": "user", "content": PROMPT}]]
    (answer,) = llm.generate_outputs(inputs=messages, num_generations=3, temperature=0.9, max_new_tokens=8, logprobs=2)
    llm.unload()
    found["answers"] = answer["generations"]
    found["counts"] = [len(tokens) for tokens in answer["logprobs"]]
    reference = load()
    found["expected"] = {prompt: complete(*reference, prompt, 8, chat=True) for prompt in PROMPTS}
    print(json.dumps(found))
