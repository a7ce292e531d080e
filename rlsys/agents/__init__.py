"""Agents, programs that query the model over HTTP: their processes, and the HTTP server that answers them."""
