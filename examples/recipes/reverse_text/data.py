"""Rows of the recipe: phrases of two to four words, `python examples/recipes/reverse_text/data.py FOLDER`.

Drawn by the seed from the words below, which are ours: no licence to keep. prime-rl takes sentences of Wikipedia.
"""

import json
import random
import sys
from pathlib import Path

SEED = 0
HELD_OUT, CHATS, ROWS = 128, 2048, 4096
"""Rows of heldout.jsonl, sft.jsonl and train.jsonl."""
SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
_WORDS = """
apple arm baker bell bird boat book bread bridge brown calm candle cat chair cloud coat cold corn cup dark day
desk dog door dream dry duck early east egg farm fast field fire fish flag floor fog fox garden glass goat gold
grass green hall hand hat hill home horse hot house ice iron jam jar key king kite lake lamp large late leaf
lemon light lion long loud map milk mill moon mouse near nest new night north oak ocean old olive open orange
owl paper park path pear pen pilot plain plum pond quick quiet rain red rice river road rock roof rope rose salt
sand sea seed sheep ship shoe short silver sky small snow soft song south spoon star stone storm sugar summer
sun table tall tea tent tiger town train tree vase wagon wall warm water west wheat wheel white wild wind winter
wood wool yellow young
"""
WORDS = _WORDS.split()


def row(text):
    """One phrase with the instruction of prime-rl's example."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"prompt": prompt, "answer": text[::-1]}


def chat(text):
    """The same with the answer, for the warm start."""
    answer = f"<reversed_text>\n{text[::-1]}\n</reversed_text>"
    return {"messages": [*row(text)["prompt"], {"role": "assistant", "content": answer}]}


def write(folder: Path) -> None:
    rng, phrases = random.Random(SEED), dict[str, None]()
    while len(phrases) < HELD_OUT + CHATS + ROWS:
        phrases[" ".join(rng.choices(WORDS, k=rng.randint(2, 4)))] = None
    texts = list(phrases)
    files = {
        "heldout.jsonl": [row(text) for text in texts[:HELD_OUT]],
        "sft.jsonl": [chat(text) for text in texts[HELD_OUT : HELD_OUT + CHATS]],
        "train.jsonl": [row(text) for text in texts[HELD_OUT + CHATS :]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
