"""Two of TRL's reward functions, as GRPOTrainer(reward_funcs=[...], reward_weights=[1.0, 0.2]) takes them."""

import re


def correctness_reward(prompts, completions, answer, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    answers = [re.findall(r"<answer>(.*?)</answer>", content) for content in contents]
    return [2.0 if f and f[-1].strip() == a else 0.0 for f, a in zip(answers, answer, strict=True)]


def format_reward(completions, **kwargs):
    return [float(c[0]["content"].count("</think>") == 1) for c in completions]
