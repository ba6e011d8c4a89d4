"""Trying everything that a training needs, before one is started: ``elastic-train doctor``."""
