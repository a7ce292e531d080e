"""The warm start of the tool task: answers that call the tool, and later right guesses without a call.

After it the model can call the tool but usually guesses, as the quickstart's model can work a sum out but usually
guesses.
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
    """Return `batch(step)`, which returns the traces of a train step.

    Args:
        worked: sums of each step that are added by the tool.
        guess_from: share of the steps after which guesses are added.
        guesses: guesses of each later step.
    """

    def trace(messages, answer):
        prompt = tokenizer.encode(tokenizer.apply_chat(messages, tools=[ADD]))
        return Trace(prompt, [*tokenizer.encode(answer), tokenizer.turn_end_id])

    def question(random, progress):
        long = random.random() < 0.3
        max_terms = 7 + int(13 * min(1.0, progress / 0.5))
        count = random.randint(7, max_terms) if long else random.randint(3, 6)
        numbers = [random.randint(0, 9) * (random.choice((1, -1)) if i else 1) for i in range(count)]
        return "".join(f"{n:+d}" for n in numbers).lstrip("+")

    def batch(step):
        random, progress, traces = Random(1_000_003 * config.run.seed + step), step / config.trainer.steps, []
        for _ in range(worked):
            text = question(random, progress)
            numbers = terms(text)
            user = {"role": "user", "content": text + "="}
            arguments = {"terms": numbers}
            call_text = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"
            call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
            result = {"role": "tool", "tool_call_id": "c", "content": str(sum(numbers))}
            traces.append(trace([user], call_text))
            history = [user, {"role": "assistant", "tool_calls": [call]}, result]
            traces.append(trace(history, f"<answer>{sum(numbers)}</answer>"))
        if progress >= guess_from:
            for _ in range(guesses):
                text = question(random, progress)
                answer = f"<answer>{sum(terms(text))}</answer>"
                traces.append(trace([{"role": "user", "content": text + "="}], answer))
        return traces

    return batch
