"""An environment of one's own, as docs/environments.md shows it: a sum, term by term. It needs no package."""

import os
import signal
import time

from rlsys.environments.contract import Opening, Step, as_messages


class Sums:
    """The model is told one term after the other, and says the running total. `slow`: seconds of a step."""

    def __init__(self, slow=0.0, log=None):
        self.slow, self.log = slow, log

    def open(self, task, seed):
        if task.get("raises"):
            raise ValueError("no such task")
        return Sum(self, task["terms"], task)


class Sum:
    def __init__(self, made, terms, task):
        self.made, self.terms, self.task, self.at = made, list(terms), task, 0
        self.opening = Opening(as_messages(self.terms[0]))

    def step(self, action):
        if self.made.log:
            with open(self.made.log, "a") as log:
                log.write(f"{os.getpid()} {self.at} {action.text}\n")
        marker = self.task.get("kill_once")
        if marker and self.at == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.task.get("poison") and self.at == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.task.get("hangs"):
            time.sleep(3600)
        time.sleep(self.made.slow)
        self.at += 1
        right = action.text.strip() == str(sum(self.terms[: self.at]))
        done = self.at == len(self.terms)
        observation = f"{os.getpid()}" if self.task.get("fickle") else "" if done else self.terms[self.at]
        return Step(as_messages(observation), float(right), done)

    def close(self):
        pass


class SlowTries:
    """A sum of the quickstart's, with a second try; each step takes a while, so that deaths come in the middle."""

    def open(self, task, seed):
        return SlowTry(f"<answer>{task['answer']}</answer>")


class SlowTry:
    opening = Opening()

    def __init__(self, answer):
        self.answer, self.turns = answer, 0

    def step(self, action):
        time.sleep(0.1)
        self.turns += 1
        right = self.answer in action.text
        return Step(as_messages("again"), right / self.turns, right or self.turns == 2)

    def close(self):
        pass
