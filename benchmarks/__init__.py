"""The measurements behind pages of docs/results: speed beside other simulators, kills, attacks."""
