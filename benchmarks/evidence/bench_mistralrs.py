"""Times one request of mistral.rs, which takes texts and not token ids, on random weights of Qwen3-0.6B's shape.

    python benchmarks/evidence/bench_mistralrs.py prepare FOLDER --lens 64 2048     with our interpreter
    PYTHON benchmarks/evidence/bench_mistralrs.py run FOLDER --quant Q8_0 --input-len 64 --output-len 96 --repeat 3

PYTHON is an interpreter with the package mistralrs. Its counterpart is `bench.py --num-seqs 1`.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "nanovllm" / "assets" / "tiny-qwen3"
WORDS = ["the", "quick", "brown", "fox", "counts", "from", "three", "to", "nine", "what", "is", "one", "of", "japan"]


def prepare(folder: Path, lens: list[int]) -> None:
    """Write the checkpoint as mistral.rs reads it, our small tokenizer, and a text of each number of tokens."""
    sys.path.insert(0, str(ROOT))
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    from benchmarks.random_checkpoint import write_random_checkpoint
    from nanovllm.features.shapes import preset_config

    write_random_checkpoint(preset_config("qwen3-0.6b"), "bfloat16", folder)
    weights = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        weights |= load_file(path)
        path.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": 1_000_000, "max_window_layers": 28, "use_sliding_window": False, "attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for length in lens:
        words: list[str] = []
        num_tokens = 0
        while num_tokens < length:
            words += [WORDS[i % len(WORDS)] for i in range(max(1, (length - num_tokens) // 4))]
            num_tokens = len(tokenizer.encode(" ".join(words)).ids)
        print(f"{length}.txt has {num_tokens} tokens")
        (folder / f"{length}.txt").write_text(" ".join(words))


def run(folder: Path, quant: str | None, input_len: int, output_len: int, repeat: int) -> None:
    from mistralrs import Architecture, CompletionRequest, Runner, Which

    which = Which.Plain(model_id=str(folder), arch=Architecture.Qwen3, tokenizer_json=str(folder / "tokenizer.json"))
    runner = Runner(which=which, in_situ_quant=quant, max_seqs=1, prefix_cache_n=0)
    text = (folder / f"{input_len}.txt").read_text()
    for _ in range(repeat):
        start = time.perf_counter()
        request = CompletionRequest(model="default", prompt=text, max_tokens=output_len, temperature=0.6)
        usage = runner.send_completion_request(request).usage
        print(
            f"{usage.prompt_tokens} in, {usage.completion_tokens} out: {time.perf_counter() - start:.2f} s; "
            f"{usage.avg_prompt_tok_per_sec:.1f} prompt and {usage.avg_compl_tok_per_sec:.1f} output tokens a second",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("--lens", type=int, nargs="+", default=[64, 2048])
    preparing.set_defaults(command=prepare)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--quant", help="Q8_0 or Q4K, for example; by default weights stay bfloat16")
    running.add_argument("--input-len", type=int, default=64)
    running.add_argument("--output-len", type=int, default=96)
    running.add_argument("--repeat", type=int, default=1)
    running.set_defaults(command=run)
    arguments = vars(parser.parse_args())
    arguments.pop("command")(**arguments)


if __name__ == "__main__":
    main()
