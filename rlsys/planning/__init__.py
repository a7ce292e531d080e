"""Group policies at work in the rollout process, and the services that they use: judges, probes, repairs,
teachers.
"""
