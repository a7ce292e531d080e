"""Agents, programs that query the model over HTTP: their processes, their endpoint, and the chat APIs that it serves."""
