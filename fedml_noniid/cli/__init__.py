"""The command line.

A file per verb or group: it reads arguments, calls `pipelines` or `plugins`, and shows.

Only functions import what imports torch, so help and errors of the command line come at once.
"""
