"""The driver: the process that runs one attempt, and calls Ray Train's ``fit()``."""
