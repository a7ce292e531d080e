"""An environment in a separate process: after a wrong answer the model may try again, for half the reward.

    rlsys train examples/second_try.yaml

The prompt is the one in the data's row, so the opening has no message. `step` returns the reward of a turn.
"""

from rlsys.environments.contract import Opening, Step, as_messages


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
        return Step(as_messages("again"), reward=right / self.turns, done=right or self.turns == 2)

    def close(self):
        pass
