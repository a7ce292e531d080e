"""Group plug-ins of the rollout process, and their services: judges, probes, repairs, teachers."""
