"""Environment services: their processes need only the standard library and the environment's package.

This package runs in the venv of the environment's package, so it imports no other part of rlsys than
rlsys.core.sockets.
"""
