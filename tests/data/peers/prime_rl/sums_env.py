"""An environment of one turn, as prime-rl trains on: what `vf.load_environment("sums-env")` would load."""

import json
import random
import re

import verifiers as vf
from datasets import Dataset


def load_environment(num_examples: int = 200, seed: int = 0) -> vf.Environment:
    rng = random.Random(seed)
    questions = {}
    while len(questions) < num_examples:
        terms = [rng.randint(1, 9) * rng.choice((1, -1)) for _ in range(rng.randint(3, 6))]
        terms[0] = abs(terms[0])
        questions["".join(f"{t:+d}" for t in terms)[1:] + "="] = str(sum(terms))
    rows = [{"question": q, "answer": a, "info": json.dumps({"terms": len(q)})} for q, a in questions.items()]
    parser = vf.Parser(
        extract_fn=lambda text: (re.findall(r"<answer>(.*?)</answer>", text) or [""])[-1].strip()
    )

    async def correct_answer(parser, completion, answer, **kwargs) -> float:
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    def answered(completion, info, **kwargs) -> float:
        assert info["terms"] > 0
        return float("</answer>" in completion[-1]["content"])

    rubric = vf.Rubric(funcs=[correct_answer, answered], weights=[1.0, 0.1], parser=parser)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=rubric)
