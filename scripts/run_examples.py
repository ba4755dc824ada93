"""Runs vLLM's examples on this engine, and prints for each whether it ran, or why it did not.

python scripts/run_examples.py FOLDER [NAME ...]

FOLDER is the folder `examples` of a source release of vLLM's. Each example is copied, the name of every model in it is
replaced by the built-in model's folder, and the copy runs under `nanovllm run`. It gets no argument, but for the
model if the example leaves that to vLLM's parser. NAMEs choose the
examples whose path holds one of them; without any, those of offline inference run: the files with `offline` in their
path, and those that vLLM 0.10 had in a folder of that name. docs/programs.md has the table.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).parents[1] / "nanovllm" / "assets" / "tiny-qwen3"
HUB_ID = re.compile(r"""(["'])(?!text/|image/|audio/|video/|application/)[A-Za-z0-9-]+/[A-Za-z0-9][\w.-]*\1""")
"""A string that is the name of a model on the hub: an owner, a slash and a name."""

OFFLINE = (
    *("offline", "deployment/", "logits_processor/", "only_thinker", "skip_loading", "batch_llm_inference"),
    *("disaggregated_prefill", "example_connector/"),
)
"""Parts of the paths of the examples of offline inference."""


def replace_models(source: str) -> str:
    """Return the source of an example with the built-in model in place of every other."""
    return HUB_ID.sub(repr(str(MODEL)), source)


def run_example(path: Path, seconds: int) -> tuple[bool, str]:
    """Run one example; return whether it and the processes that it starts ended well, and the last line of an error."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(MODEL.parents[2])])}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(path.parent, folder, dirs_exist_ok=True)  # an example may read files beside it
        copy = Path(folder) / path.name
        copy.write_text(replace_models(path.read_text()))
        command = [sys.executable, "-m", "nanovllm", "run", str(copy)]
        if "EngineArgs.add_cli_args" in copy.read_text() and str(MODEL) not in copy.read_text():
            command += ["--model", str(MODEL)]  # the default of vLLM's parser, which the example does not name
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False, f"has not ended after {seconds} s"
    errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*Error: |.*: error: |ERROR ", line)]
    did_run = done.returncode == 0 and "Traceback (most" not in done.stderr
    return did_run, errors[-1] if errors else f"status {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", default=OFFLINE, metavar="NAME")
    parser.add_argument("--seconds", type=int, default=300, help="the most seconds of one example (default: 300)")
    options = parser.parse_intermixed_args()
    num_run = 0
    paths = sorted(options.folder.rglob("*.py"))
    chosen = [path for path in paths if any(name in str(path.relative_to(options.folder)) for name in options.names)]
    print("| example | |\n| --- | --- |")
    for path in chosen:
        did_run, reason = run_example(path, options.seconds)
        num_run += did_run
        print(f"| {path.relative_to(options.folder)} | {'runs' if did_run else reason} |", flush=True)
    print(f"\n{num_run} of {len(chosen)} run")


if __name__ == "__main__":
    main()
