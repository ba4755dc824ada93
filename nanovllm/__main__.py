"""Runs the command `nanovllm` as `python -m nanovllm`."""

import sys

from nanovllm.cli import main

sys.exit(main())
