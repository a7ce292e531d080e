"""Property tests: the same examples on every run, and no time limit on any of them. What every session does."""

from hypothesis import settings

pytest_plugins = ["tests.gate.durations", "tests.gate.budget", "tests.gate.counts"]

settings.register_profile("rlsys", deadline=None, derandomize=True)
settings.load_profile("rlsys")
