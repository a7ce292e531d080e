from types import SimpleNamespace

from examples.recipes.chain_sum.reward import reward
from rlsys.core.types import Response


def test_only_the_right_answer_in_its_tags_counts():
    entry = {"question": "1+2=", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    score, prompt = reward(None), SimpleNamespace(entry=entry)
    assert score(prompt, Response("<think>1+2=3</think><answer>3</answer>", finished=True)) == 1
    assert score(prompt, Response("<answer>4</answer>", finished=True)) == 0
    assert score(prompt, Response("<answer>3</answer>", finished=False)) == 0, "cut off"
