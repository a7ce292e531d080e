"""Group policies in the rollout process and their services: judges, probes, repairs, teachers."""
