"""Environment services: the process of an environment, its clients, and connectors of third-party environments.

The process may run in the venv of a third-party package, so this package needs only the standard library, and imports
no other part of rlsys than rlsys.core.sockets.
"""
