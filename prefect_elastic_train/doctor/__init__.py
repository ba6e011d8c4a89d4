"""Checks of everything that a training needs: ``elastic-train doctor``. Runs in the CLI."""
