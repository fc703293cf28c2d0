"""Pictures of the paper that are no curves."""
