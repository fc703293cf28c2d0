"""The five papers, a folder each: studies, targets, claims, and the pictures drawn from runs."""
