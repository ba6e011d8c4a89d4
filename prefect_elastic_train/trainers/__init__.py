"""Sessions inside the trainers of other libraries: ``trainers.lightning`` and ``trainers.transformers``.

Neither is imported with the package. Each imports its library, which the extra of the same name installs.
"""
