"""Similarity of the text in the tags and the reversed prompt, 0 to 1, as in prime-rl's reverse-text environment."""

import re
from difflib import SequenceMatcher

TAGGED = re.compile(r"<reversed_text>\s*(.*?)\s*</reversed_text>", re.DOTALL)


def reward(config):
    def score(prompt, text):
        tagged = TAGGED.search(text)
        return SequenceMatcher(None, tagged[1] if tagged else "", prompt.entry["answer"]).ratio()

    return score
