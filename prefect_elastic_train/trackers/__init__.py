"""Trackers such as MLflow, for train workers: one run in each for all restarts of a training.

The flow process marks these runs as failed. Imports nothing else of the package.
"""
