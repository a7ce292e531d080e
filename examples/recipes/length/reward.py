"""The closer to the length in the row, the higher: of 20 characters 1 at 20, 1/2 at 40, 1/10 at 200.

TRL's example has minus the distance to 20; this reward orders responses in the same way, and lies between 0 and 1.
"""


def reward(config):
    def score(prompt, text):
        length = prompt.entry["answer"]
        return length / (length + abs(length - len(text)))

    return score
