"""Stands in for the package verifiers, which wants other versions of openai than SGLang: the names and attributes
that a one-turn environment uses of it."""


class Parser:
    def __init__(self, extract_fn=lambda text: text):
        self.extract_fn = extract_fn

    def parse_answer(self, completion):
        return self.extract_fn(completion[-1]["content"])


class Rubric:
    def __init__(self, funcs=None, weights=None, parser=None):
        self.funcs, self.weights, self.parser = funcs or [], weights or [], parser


class Environment:
    def __init__(
        self, dataset=None, eval_dataset=None, system_prompt=None, few_shot=None, parser=None, rubric=None
    ):
        self.dataset, self.eval_dataset = dataset, eval_dataset
        self.system_prompt, self.few_shot = system_prompt, few_shot
        self.parser, self.rubric = parser, rubric


class SingleTurnEnv(Environment):
    max_turns = 1
