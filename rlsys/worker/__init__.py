"""Rollout workers: samples from their first token to their reward, in one process or several."""
