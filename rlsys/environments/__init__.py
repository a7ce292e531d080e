"""Environment services: their processes need only the standard library and the package of the environment.

Of the rest of rlsys this package imports rlsys.core.sockets only: it runs in the venv of the environment's package.
"""
