"""The control plane: what runs in each step, and where its KV lives. No torch outside the runner and below."""
