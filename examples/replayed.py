"""A custom match for trajectories: the model's turn matches the expert's action if their answers are equal.

rlsys train examples/replayed.yaml
"""


def same_answer(turn: str, action: str) -> float:
    """Return 1 if the text after the last <answer> is the same in the turn and the expert's action, else 0."""
    return float(turn.rpartition("<answer>")[2] == action.rpartition("<answer>")[2])
