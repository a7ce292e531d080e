"""What every process knows: domain types, errors, ownership, identity, sockets. No package of rlsys is imported
here.
"""
