"""This rank's part of the model: layers, adapters, heads, router replay, parameters."""
