"""Relay of weights from host to host, for engines behind a slow link. Standard library only."""
