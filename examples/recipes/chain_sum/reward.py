"""1 if reasoning-gym's verifier gives the answer between <answer> and </answer> full marks, else 0."""

from rlsys.rewards.answer import reasoning_gym


def reward(config):
    return reasoning_gym(config)
