"""A task of sums with data and unmodified reward functions in the formats of verl, slime, TRL and prime-rl."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

import datasets

FOLDER = Path(__file__).parents[1] / "data" / "peers"
PEERS = ("verl", "slime", "trl", "prime_rl")


def sums(count: int) -> list[dict[str, str]]:
    """Return questions and answers in the form on which the shipped model was trained."""
    rng, rows = random.Random(1), dict[str, str]()
    while len(rows) < count:
        terms = [rng.randint(1, 9) * rng.choice((1, -1)) for _ in range(rng.randint(3, 6))]
        terms[0] = abs(terms[0])
        rows["".join(f"{t:+d}" for t in terms)[1:] + "="] = str(sum(terms))
    return [{"question": q, "answer": a} for q, a in rows.items()]


def write_task(peer: str, folder: Path, count: int = 200) -> Path:
    """Write the config and the data of a peer's task to `folder`, and return the config's path.

    The config refers to the reward function in tests/data/peers.
    """
    rows, peer_folder = sums(count), FOLDER / peer
    data: dict[str, Any]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    if peer == "verl":
        runpy.run_path(str(peer_folder / "sums.py"))["write"](rows, str(folder / "train.parquet"))
        data = {"source": "parquet", "params": {"path": str(folder / "train.parquet")}}
        data |= {"reward": f"{peer_folder}/sums.py:compute_score"}
    elif peer == "slime":
        lines = [{"prompt": c, "label": r["answer"]} for c, r in zip(chats, rows, strict=True)]
        (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = {"source": "jsonl", "params": {"path": str(folder / "train.jsonl")}}
        data |= {"reward": f"{peer_folder}/custom_rm.py:custom_rm"}
    elif peer == "trl":
        table = [{"prompt": c, "answer": r["answer"]} for c, r in zip(chats, rows, strict=True)]
        datasets.Dataset.from_list(table).save_to_disk(str(folder / "train"))
        data = {"source": "dataset", "params": {"name": str(folder / "train")}}
        functions = {"correctness_reward": 1.0, "format_reward": 0.2}
        specs = [{"name": f"{peer_folder}/rewards.py:{f}", "weight": w} for f, w in functions.items()]
        data |= {"reward": specs}
    else:
        params = {"load": f"{peer_folder}/sums_env.py:load_environment", "args": {"num_examples": count}}
        data = {"source": "environment", "params": params, "reward": "environment"}
    config = folder / f"{peer}.yaml"
    config.write_text(json.dumps({"base": "quickstart", "data": data, "eval": {"prompts": 4}}))
    return config
