"""Other simulators, one script each.

Their own interpreters run the scripts, so nothing here imports our plugins.
"""
