"""What people are shown of a run: its accounts and its log."""
