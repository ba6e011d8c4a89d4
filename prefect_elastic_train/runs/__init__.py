"""The run directory: who owns a run, which attempt may write it, and what a restart resumes from."""
