"""Rehearsing recovery: faults on the user's own loop, and a certificate of what came of them."""
