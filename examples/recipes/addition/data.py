"""Rows of the recipe: sums of two numbers from 0 to 100, `python examples/recipes/addition/data.py FOLDER`.

Generated from nothing but the seed, so there is no licence to keep. Each pair of numbers is in one file only.
"""

import json
import random
import sys
from pathlib import Path

SEED = 0
HELD_OUT, CHATS = 256, 2048
"""Rows of heldout.jsonl and of sft.jsonl; train.jsonl has the rest."""


def row(x, y):
    """One solved sum as an example, then the question, as in tinker-cookbook's arithmetic environment."""
    return {
        "prompt": [
            {"role": "user", "content": "What is 4 + 5?"},
            {"role": "assistant", "content": "9"},
            {"role": "user", "content": f"What is {x} + {y}?"},
        ],
        "answer": str(x + y),
    }


def chat(x, y):
    """The same with the answer, for the warm start."""
    solved = row(x, y)
    return {"messages": [*solved["prompt"], {"role": "assistant", "content": solved["answer"]}]}


def write(folder: Path) -> None:
    pairs = [(x, y) for x in range(101) for y in range(101)]
    random.Random(SEED).shuffle(pairs)
    files = {
        "heldout.jsonl": [row(*pair) for pair in pairs[:HELD_OUT]],
        "sft.jsonl": [chat(*pair) for pair in pairs[HELD_OUT : HELD_OUT + CHATS]],
        "train.jsonl": [row(*pair) for pair in pairs[HELD_OUT + CHATS :]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
