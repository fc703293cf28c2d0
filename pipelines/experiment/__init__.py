"""The experiment of params.yaml: settings, items, the store of finished work, results on disk."""
