"""The stand-in: scripts and programs that import vllm get this engine, without a change of theirs."""
