"""The public path of the model for lm-evaluation-harness: see apps/lm_eval.py. Importing it registers the model."""

from nanovllm.apps.lm_eval import NanoVLLM

__all__ = ["NanoVLLM"]
