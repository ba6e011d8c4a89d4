"""Block documents as code: `blocks.profiles` defines them, `python -m blocks.apply` saves them."""
