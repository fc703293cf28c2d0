"""The verbs of `python -m research`."""
