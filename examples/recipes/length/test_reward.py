from examples.recipes.length.reward import reward


def test_twenty_characters_are_best():
    score = reward(None)
    assert score(None, 20 * "x") == 1
    assert score(None, 40 * "x") == score(None, "") == 0.5
    assert score(None, 200 * "x") == 0.1
