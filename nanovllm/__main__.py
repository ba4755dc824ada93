"""Runs the command `nanovllm` as `python -m nanovllm`."""

from nanovllm.cli import run

run()
