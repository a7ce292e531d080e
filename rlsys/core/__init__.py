"""Domain types, errors, ownership, identity and sockets: shared by every process.

No other package of rlsys is imported here.
"""
