"""Rehearsals: inject faults into a training of the user's loop, and certify that the loop recovers. Runs in the CLI."""
