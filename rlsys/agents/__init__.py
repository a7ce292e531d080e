"""Agents, programs that query the model over HTTP: their processes, their endpoint, and the chat APIs it serves."""
