"""Weights reach a GPU through two pinned buffers, whatever their shape, and no buffer is refilled while it is read."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from helpers.rehearsal import RehearsalError, rehearse
from helpers.rehearsal.card import Card
from helpers.tiny import save_random

from nanovllm import LLM
from nanovllm.backends.gpu.pinned import PinnedCopier

CUDA = torch.device("cuda:0")


@pytest.fixture
def card() -> Iterator[Card]:
    with rehearse() as card:
        yield card


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (100,), (5, 3), (3, 16), (2, 3, 4), (0, 4)])
def test_every_element_arrives(shape: tuple[int, ...], dtype: torch.dtype, card: Card) -> None:
    """Tensors that fit into a buffer of 64 bytes, and rows that do. Files have float32."""
    source = torch.randn(shape)
    target = torch.zeros(shape, dtype=dtype, device=CUDA)
    copier = PinnedCopier(CUDA, buffer_bytes=64)
    copier.copy(target, source)
    assert torch.equal(target.cpu(), source.to(dtype))


def test_a_part_of_a_parameter_is_filled_and_nothing_beside_it(card: Card) -> None:
    """A rank's columns, which do not lie side by side."""
    source = torch.randn(6, 4)
    parameter = torch.zeros(6, 12, device=CUDA)
    copier = PinnedCopier(CUDA, buffer_bytes=64)
    for start in (0, 4):
        copier.copy(parameter[:, start : start + 4], source)
    assert torch.equal(parameter.cpu(), torch.cat([source, source, torch.zeros(6, 4)], 1))


def test_a_buffer_is_not_refilled_before_its_copy_has_ended(card: Card) -> None:
    """Without the wait for its event it would be."""
    target = torch.zeros(64, device=CUDA)
    copier = PinnedCopier(CUDA, buffer_bytes=64)
    event = torch.cuda.Event()
    with (
        mock.patch.object(type(event), "synchronize", lambda self: None),
        pytest.raises(RehearsalError, match="awaited no event"),
    ):
        copier.copy(target, torch.randn(64))


def test_a_checkpoint_is_loaded_through_the_buffers(tmp_path: Path, card: Card) -> None:
    """Of 1 KiB here, so that each matrix takes many copies."""
    save_random(tmp_path, num_hidden_layers=1, vocab_size=50)
    options = {"dtype": "float32", "num_kvcache_blocks": 4, "max_model_len": 32, "enforce_eager": True}
    with mock.patch.object(PinnedCopier.__init__, "__defaults__", (1024,)), LLM(str(tmp_path), **options) as llm:
        found = {name: value.cpu() for name, value in llm.engine.runner.model.named_parameters()}
    with LLM(str(tmp_path), device="cpu", attention_backend="torch", **options) as llm:
        expected = dict(llm.engine.runner.model.named_parameters())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
