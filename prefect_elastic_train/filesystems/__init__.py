"""Storage below Ray Train: what a run directory is read and written through, with retries."""
