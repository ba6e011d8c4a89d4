"""The driver: a process of its own that runs one Ray Train attempt."""
