"""What must be said before torch and Triton are imported, and fixtures that several test files share."""

import os
import signal
from pathlib import Path

import pytest

# Models this small are fastest on one thread, and no test may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# A shell gives its background jobs, and so their tests, a SIGINT that is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton chooses where a kernel runs when it is decorated: without a GPU, in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen3 whose likeliest tokens are clear, without tokenizer or end-of-sequence ids."""
    from helpers.tiny import save_random

    folder = tmp_path_factory.mktemp("random")
    save_random(folder)
    return folder


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and its tokenizer, that recites the alphabet: see tiny.save_reciter."""
    from helpers.tiny import save_reciter

    folder = tmp_path_factory.mktemp("reciter")
    save_reciter(folder)
    return folder
