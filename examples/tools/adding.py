"""An environment with one tool: it adds. It runs in a process of its own (docs/environments.md)."""

import json

from rlsys.environments.contract import Opening, Step

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds whole numbers",
        "parameters": {
            "type": "object",
            "properties": {"terms": {"type": "array", "items": {"type": "integer"}}},
            "required": ["terms"],
        },
    },
}


class Adding:
    """Shared by all episodes, which keep nothing."""

    opening = Opening(tools=[ADD])

    def open(self, task, seed):
        return self

    def step(self, action):
        """One answer for each call."""
        return Step([{"role": "tool", "tool_call_id": c["id"], "content": answer(c)} for c in action.calls])

    def close(self):
        pass


def answer(call):
    """What the model did wrong is an answer, too."""
    try:
        return str(sum(int(term) for term in json.loads(call["arguments"])["terms"]))
    except (ValueError, KeyError, TypeError) as e:
        return f"error: {type(e).__name__}"
