"""Experiment trackers: W&B, MLflow, Trackio, SwanLab."""
