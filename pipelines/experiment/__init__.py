"""The experiment of params.yaml: settings, items, what is kept of them, results on disk."""
