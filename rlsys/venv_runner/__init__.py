"""Runs modules of rlsys in the Python of another virtual environment."""
