"""TRL's GRPO with the engine in its process: the worst difference of sampler and trainer, and the tokens of both."""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from reference import MODEL, PROMPT
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

PROMPTS = [PROMPT, "The best way to", "1 + 2 =", "A block of the cache"]


def copy_in_float32() -> str:
    """Return a folder with the built-in model, whose config.json says float32.

    TRL gives the engine no dtype, and by default the engine computes in the checkpoint's own where a processor has it.
    """
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return str(folder)


def count_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def train(temperature: float, sleep: bool, peft: bool) -> dict[str, Any]:
    """Train three steps, and let both the engine and transformers say what the trained model says."""
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=3,
        learning_rate=1e-3,
        temperature=temperature,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=sleep,
        vllm_max_model_length=256,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        seed=3,
    )
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM") if peft else None
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = GRPOTrainer(copy_in_float32(), count_letters, args=config, train_dataset=data, peft_config=lora)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    trainer.vllm_generation.sync_weights()
    llm = trainer.vllm_generation.llm
    if sleep:
        llm.wake_up(tags=["kv_cache"])
    if peft:
        trainer.model.merge_adapter()
    ids = trainer.processing_class(PROMPT)["input_ids"]
    (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    model = trainer.model.eval()
    trained = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0][len(ids) :]
    llm.close()
    return {
        "steps": len(steps),
        "difference": max(entry["sampling/sampling_logp_difference/max"] for entry in steps),
        "ratios": [entry[f"sampling/importance_sampling_ratio/{end}"] for entry in steps for end in ("min", "max")],
        "engine": list(output.outputs[0].token_ids),
        "trained": trained.tolist(),
    }


if __name__ == "__main__":
    temperature, sleep, peft = json.loads(sys.argv[1])
    print(json.dumps(train(temperature, sleep, peft)))
