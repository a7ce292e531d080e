"""A process that runs the functions which a model may call: `python -m rlsys.generators.function_worker`.

The first message is the config, every other one {"name", "arguments"}; the answer is a text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import resource
from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.process_pool import serve
from rlsys.generators.functions import find_functions


def prepare(message: bytes) -> Callable[[bytes], str]:
    config = Config.model_validate_json(message)
    functions = find_functions(config.rollout.generator_params["functions"])
    limit = round(config.data.reward_memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def answer(message: bytes) -> str:
        """A text as it is, anything else as JSON. Raises what the function raises."""
        called = json.loads(message)
        found = functions[called["name"]](**json.loads(called["arguments"] or "{}"))
        if inspect.iscoroutine(found):
            found = asyncio.run(found)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    return answer


if __name__ == "__main__":
    serve(prepare, lambda error: "")  # the model reads it: no path of this machine
