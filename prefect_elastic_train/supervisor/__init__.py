"""Starts, follows and stops drivers, as child processes or Ray jobs, and owns the local cluster.

Runs in the flow process and its helper processes: guard, head, fork server. Does not import Ray Train.
"""
