"""Computations that the trainer and engines on a CPU share."""
