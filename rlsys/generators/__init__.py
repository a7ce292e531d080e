"""Generators of responses: turns, tools, agents, environments, trees, functions; and censoring of failed samples."""
