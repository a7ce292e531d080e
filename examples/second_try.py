"""An environment in a process of its own: after a wrong answer the model may try again, for half the reward.

    rlsys train examples/second_try.yaml

The prompt is that of the data's row, so the environment opens without a word. Each turn has a reward of its own.
"""

from rlsys.environments.contract import Opening, Step, says


class SecondTry:
    def open(self, task, seed):
        return Try(f"<answer>{task['answer']}</answer>")


class Try:
    opening = Opening()

    def __init__(self, answer):
        self.answer, self.turns = answer, 0

    def step(self, action):
        self.turns += 1
        right = action.text.endswith(self.answer)
        return Step(says("again"), reward=right / self.turns, done=right or self.turns == 2)

    def close(self):
        pass
