"""Experiment trackers: W&B, MLflow."""
