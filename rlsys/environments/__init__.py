"""Environments as services: what runs there needs Python's standard library and the environment's own package.

Nothing of this folder imports anything else of rlsys, because it runs in the Python of an environment's own venv.
"""
