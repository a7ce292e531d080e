"""Process that runs the functions which a model may call: `python -m rlsys.generators.function_worker`.

The first message is the config, every other one {"name", "arguments"}; the response is a text.
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
        """Call a function and return its text, or its result as JSON. Raises what the function raises."""
        request = json.loads(message)
        result = functions[request["name"]](**json.loads(request["arguments"] or "{}"))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    return answer


if __name__ == "__main__":
    serve(prepare, lambda error: "")  # the model reads it: no path of this machine
