"""lm-evaluation-harness: its own model `vllm`, beside its model `hf` and ours, on tasks that are made here."""

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from reference import MODEL

import nanovllm.lm_eval  # noqa: F401  # this registers the model

FOLDER = Path(tempfile.mkdtemp())
SHARED = "dataset_path: json\ndataset_kwargs: {data_files: {test: FILE}}\ntest_split: test\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{gold}}'\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n",
    "answer": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{gold}}'\n"
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]\n',
    "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}]\n",
}
ROWS = [
    {"q": f"Q: {a} + {b} =", "choices": [f" {a + b}", f" {a * b}", " none of these"], "gold": 0}
    for a, b in [(1, 2), (7, 7)]
]
TEXTS = [{"text": "The cat sat on the mat. " * count + "And then?"} for count in (1, 9, 40)]
"""They are shorter than the model's windows: of a longer text, the harness's own class for vLLM makes other windows."""
OPTIONS = {"pretrained": MODEL, "dtype": "float32"}


def evaluate(model: str, **options: Any) -> dict[str, list[Any]]:
    """Return what a model answers to each request of each task."""
    tasks = TaskManager(include_path=str(FOLDER), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={**OPTIONS, **options},
        tasks=list(TASKS),
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
    )
    return {
        name: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in results["samples"].items()
    }


for name, text in TASKS.items():
    data = FOLDER / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in (TEXTS if name == "roll" else ROWS)))
    (FOLDER / f"{name}.yaml").write_text(f"task: {name}\n" + SHARED.replace("FILE", str(data)) + text)
found = {
    "vllm": evaluate("vllm", max_model_len=512),
    "hf": evaluate("hf", max_length=512, device="cpu"),
    "nanovllm": evaluate("nanovllm", max_model_len=512),
}
print(json.dumps(found))
