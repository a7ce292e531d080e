"""An environment with one tool, which adds. It runs in a separate process (docs/environments.md)."""

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
    """The environment, and each of its episodes: an episode has no state."""

    opening = Opening(tools=[ADD])

    def open(self, task, seed):
        return self

    def step(self, action):
        """Return one message for each call."""
        return Step([{"role": "tool", "tool_call_id": c["id"], "content": answer(c)} for c in action.calls])

    def close(self):
        pass


def answer(call):
    """Return the sum of a call's terms, or an error message for malformed arguments, as text for the model."""
    try:
        return str(sum(int(term) for term in json.loads(call["arguments"])["terms"]))
    except (ValueError, KeyError, TypeError) as e:
        return f"error: {type(e).__name__}"
