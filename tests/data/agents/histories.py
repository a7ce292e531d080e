"""An agent with two histories: after a wrong answer it begins anew, with a note; beside it a sub-agent has a try."""

from concurrent.futures import ThreadPoolExecutor

from tests.data.agents.plain import ask


def begins_anew(task):
    first = [{"role": "user", "content": task["question"]}]
    with ThreadPoolExecutor(2) as pool:
        reply, _ = pool.map(ask, [first, [{"role": "user", "content": f"{task['question']}+0"}]])
    if f"<answer>{task['answer']}</answer>" not in reply["content"]:
        ask([*first, {"role": "user", "content": "again"}])
