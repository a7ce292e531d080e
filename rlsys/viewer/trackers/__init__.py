"""Experiment trackers, Weights & Biases and MLflow, and the process that writes a run's metrics to them."""
