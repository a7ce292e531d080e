"""Trajectories of one's own: the model walks along an expert's steps, and its answers count, not its words.

rlsys train examples/replayed.yaml
"""


def same_answer(said: str, action: str) -> float:
    """1 where the last <answer> is the expert's."""
    return float(said.rpartition("<answer>")[2] == action.rpartition("<answer>")[2])
