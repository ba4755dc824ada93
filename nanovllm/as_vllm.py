"""Importing this module first makes `vllm` this engine, in this process and its children: see apps/standin/finders.py."""

from nanovllm.apps.standin.finders import install

install()
