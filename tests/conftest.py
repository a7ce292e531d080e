"""Property tests: the same examples on every run, and no time limit on any of them."""

from hypothesis import settings

settings.register_profile("rlsys", deadline=None, derandomize=True)
settings.load_profile("rlsys")
