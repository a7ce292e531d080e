"""Domain types, errors, ownership, identity and sockets, which all processes share.

The package imports no other package of rlsys.
"""
