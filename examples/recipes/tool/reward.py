"""1 for the right answer between <answer> and </answer> after all calls of the tool, else 0."""

from rlsys.rewards.answer import exact_answer


def reward(config):
    return exact_answer(config)
