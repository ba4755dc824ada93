"""Runs the command `nanovllm` as `python -m nanovllm`."""

from nanovllm.commands.cli import run

run()
