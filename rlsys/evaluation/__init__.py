"""Evaluation: held-out prompts, named sets, pass@k, and `rlsys try`."""
