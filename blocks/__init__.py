"""Block documents as code: `blocks.profiles` says which, `python -m blocks.apply` saves them."""
