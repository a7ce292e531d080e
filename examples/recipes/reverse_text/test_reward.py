from types import SimpleNamespace

from examples.recipes.reverse_text.reward import reward


def test_only_the_text_in_the_tags_counts():
    score, prompt = reward(None), SimpleNamespace(entry={"answer": "tac der"})
    assert score(prompt, "<reversed_text>\ntac der\n</reversed_text>") == 1
    assert 0 < score(prompt, "<reversed_text>tac</reversed_text>") < 1
    assert score(prompt, "tac der") == score(prompt, "<reversed_text>tac der") == 0
