"""Numerical operations of the trainer; engines on a CPU use some of them, too."""
