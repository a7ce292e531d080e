"""Rows of the recipe: short questions and the length of a response, `python examples/recipes/length/data.py FOLDER`.

Combined by the seed from the words below, which are ours: no licence to keep. TRL's example takes posts of Reddit.
"""

import json
import random
import sys
from pathlib import Path

SEED = 0
LENGTH = 20
"""Characters of the best response, as in TRL's example."""
HELD_OUT = 128
"""Rows of heldout.jsonl; train.jsonl has the rest."""
FORMS = (
    "What is {}?", "Describe {}.", "Tell me about {}.", "What do you think of {}?", "Why do people like {}?",
    "When did you last hear of {}?", "Where can I find {}?", "Explain {} to a child.", "Write a line about {}.",
    "How would you draw {}?", "What goes well with {}?", "Who needs {}?", "What does {} cost?", "Is {} old or new?",
    "What is the opposite of {}?", "What colour is {}?",
)  # fmt: skip
_THINGS = """
a bridge, a candle, a clock, a cloud, a compass, a desert, a door, a drum, a farm, a forest, a garden, a guitar,
a harbour, a holiday, a kite, a ladder, a lake, a letter, a library, a lighthouse, a market, a mirror,
a mountain, a museum, a novel, a painting, a piano, a planet, a poem, a river, a sailing boat, a school, a shadow,
a song, a spoon, a storm, a suitcase, a train, a violin, a volcano, a waterfall, a windmill, an atlas, an echo,
an engine, an island, an orchard, an umbrella, bread, chess, coffee, glass, honey, ice, iron, paper, rain, salt,
silence, snow, soap, tea, the moon, the north, the weather, wool
"""
THINGS = [thing.strip() for thing in _THINGS.split(",")]


def write(folder: Path) -> None:
    questions = [form.format(thing) for form in FORMS for thing in THINGS]
    random.Random(SEED).shuffle(questions)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", questions[:HELD_OUT]), ("train", questions[HELD_OUT:])):
        rows = "".join(json.dumps({"prompt": question, "answer": LENGTH}) + "\n" for question in part)
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
