"""A rollout worker: its engines, the streams of its samples, their scores, and its link to the coordinator."""
