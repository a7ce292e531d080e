"""As in verl's examples/data_preprocess: rows with data_source, prompt, ability, reward_model and extra_info; and the
function of `custom_reward_function`."""

import re

import datasets


def make_map_fn(split):
    def process_fn(example, idx):
        return {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": example["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": example["answer"]},
            "extra_info": {"split": split, "index": idx, "question": example["question"]},
        }

    return process_fn


def write(rows, path):
    table = datasets.Dataset.from_list(rows)
    table.map(make_map_fn("train"), with_indices=True, remove_columns=table.column_names).to_parquet(path)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "sums":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str)
    right = bool(answers) and answers[-1].strip() == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "answered": bool(answers)}
