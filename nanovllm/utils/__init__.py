"""What the rest leans on: checks of what users pass, Ctrl-C, what the machine has."""
