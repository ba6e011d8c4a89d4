"""Storages behind one protocol: a directory or an object store, with retries and classes of faults."""
