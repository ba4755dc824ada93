"""Importing this module makes `vllm` this engine, in this process and its children: see apps/standin/."""

from nanovllm.apps.standin.finders import install

install()
