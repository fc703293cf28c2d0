"""Commands for people, beside the pipeline: list methods, describe partitions, keep results."""
