"""The closer to 20 characters, the higher: 1 at 20, 1/2 at 40, 1/10 at 200.

TRL's example has minus the distance to 20; this reward orders responses in the same way, and lies between 0 and 1.
"""

LENGTH = 20


def reward(config):
    return lambda prompt, text: LENGTH / (LENGTH + abs(LENGTH - len(text)))
