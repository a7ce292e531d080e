"""The part of the model on one rank: layers, adapters, heads, router replay, parameters."""
