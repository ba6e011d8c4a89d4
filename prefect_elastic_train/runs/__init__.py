"""The run directory, for all processes: its owner, the fence, commits, resume and pruning."""
