"""Which method to use: learnt from runs on scenarios of known skew.

`docs/advise.md` explains it.
"""
