"""A step as the original nano-vLLM returns it: its loops read from the sign of a count whether the step decoded."""

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduled_step import ScheduledStep


def run_step(engine: LLMEngine) -> tuple[list[tuple[int, list[int]]], int]:
    """Run one step of the queued requests: see `LLM.step`."""
    engine.last_read = None
    ended = engine.step() if engine.has_work else []
    read = engine.last_read
    return [(seq.seq_id, seq.output_token_ids) for seq in ended], 0 if read is None else count_tokens(read)


def count_tokens(step: ScheduledStep) -> int:
    """Return the number of tokens of a step; the negative number if the step only decoded.

    Two tests show that it only decoded. Each of its tokens gave a sample. And none of its tokens is of a prompt: the
    last token of a prompt gives a sample, too.
    """
    plan = step.plan
    lengths = [seq.num_prompt_tokens for seq in step.seqs]
    are_decodes = plan.num_tokens == plan.num_sampled.sum() and (plan.num_computed >= lengths).all()
    return -plan.num_tokens if are_decodes else plan.num_tokens
