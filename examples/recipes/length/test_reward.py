from types import SimpleNamespace

from examples.recipes.length.reward import reward


def test_twenty_characters_are_best():
    score, prompt = reward(None), SimpleNamespace(entry={"answer": 20})
    assert score(prompt, 20 * "x") == 1
    assert score(prompt, 40 * "x") == score(prompt, "") == 0.5
    assert score(prompt, 200 * "x") == 0.1
