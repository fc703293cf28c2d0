"""Other simulators, a script each, that run with an interpreter which has them; nothing here imports our plugins."""
