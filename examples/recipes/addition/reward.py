"""1 if the response's first word is the sum, else 0, as in tinker-cookbook's arithmetic environment."""


def reward(config):
    def score(prompt, text):
        words = text.split()
        return float(bool(words) and words[0] == prompt.entry["answer"])

    return score
