"""What the rest leans on: loading checkpoints, finding them, checking names, holding Ctrl-C."""
