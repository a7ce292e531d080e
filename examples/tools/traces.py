"""The warm start: answers that call the tool, and then, as the model's habit, right guesses without it.

So the model can call a tool and prefers not to, as the quickstart's model can work a sum out and would rather guess.
"""

import json
import sys
from pathlib import Path
from random import Random

from rlsys.data.trace import Trace
from rlsys.data.traces import terms

sys.path.insert(0, str(Path(__file__).parent))
from adding import ADD


def calls(config, tokenizer, worked=20, guess_from=0.85, guesses=60):
    """`worked`: sums of each step that are added by the tool; `guesses`: from that part of the steps on."""

    def turn(messages, said):
        prompt = tokenizer.encode(tokenizer.apply_chat(messages, tools=[ADD]))
        return Trace(prompt, [*tokenizer.encode(said), tokenizer.turn_end_id])

    def question(random, done):
        long = random.random() < 0.3
        top = 7 + int(13 * min(1.0, done / 0.5))
        count = random.randint(7, top) if long else random.randint(3, 6)
        numbers = [random.randint(0, 9) * (random.choice((1, -1)) if i else 1) for i in range(count)]
        return "".join(f"{n:+d}" for n in numbers).lstrip("+")

    def batch(step):
        random, done, out = Random(1_000_003 * config.run.seed + step), step / config.trainer.steps, []
        for _ in range(worked):
            text = question(random, done)
            numbers = terms(text)
            asked = {"role": "user", "content": text + "="}
            arguments = {"terms": numbers}
            said = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"
            made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
            told = {"role": "tool", "tool_call_id": "c", "content": str(sum(numbers))}
            out.append(turn([asked], said))
            history = [asked, {"role": "assistant", "tool_calls": [made]}, told]
            out.append(turn(history, f"<answer>{sum(numbers)}</answer>"))
        if done >= guess_from:
            for _ in range(guesses):
                text = question(random, done)
                out.append(
                    turn([{"role": "user", "content": text + "="}], f"<answer>{sum(terms(text))}</answer>")
                )
        return out

    return batch
