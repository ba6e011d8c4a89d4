"""Pure functions from events to what users see: report, accounts, curves and text."""
