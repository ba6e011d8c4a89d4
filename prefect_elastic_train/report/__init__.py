"""What people are shown of a run: pure functions from events to reports, curves, accounts and words."""
