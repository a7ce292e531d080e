"""Generators, which generate the response of a sample, and the censoring of samples that fail."""
