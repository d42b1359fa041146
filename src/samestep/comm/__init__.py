"""Communication between workers: a `World` is passed as a value.

With a single worker, every call returns its input.
"""
