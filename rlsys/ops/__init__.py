"""Computations of the trainer, some of which engines on a CPU share."""
