from types import SimpleNamespace

from examples.recipes.addition.reward import reward


def test_the_first_word_decides():
    score, prompt = reward(None), SimpleNamespace(entry={"answer": "12"})
    assert score(prompt, "12") == score(prompt, " 12\nand more") == 1
    assert score(prompt, "") == score(prompt, "the sum is 12") == score(prompt, "120") == 0
