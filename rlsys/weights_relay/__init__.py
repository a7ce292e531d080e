"""Weights from host to host over a slow link. Standard library only."""
