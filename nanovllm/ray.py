"""The public path of the engine for Ray Data: see apps/ray/data.py."""

from nanovllm.apps.ray.data import RayLLM, actors

__all__ = ["RayLLM", "actors"]
