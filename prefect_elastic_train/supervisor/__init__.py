"""Starts, follows and ends drivers, as child processes or Ray jobs, and owns the local cluster. No Ray Train."""
