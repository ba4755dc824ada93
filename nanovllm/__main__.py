"""Runs the command `nanovllm` as `python -m nanovllm`."""

from nanovllm.apps.cli import run

run()
