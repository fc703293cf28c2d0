"""MLflow: runs, registered models, the prepared view. The only room that imports mlflow."""
