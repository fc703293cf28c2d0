"""Pictures of rFedAvg's paper that are no curves."""
