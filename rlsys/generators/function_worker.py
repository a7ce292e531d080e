"""Process that runs the functions that a model calls: `python -m rlsys.generators.function_worker`.

The first message is the config. Each later message is a JSON object with "name" and "arguments"; its response
is text.
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
    """Import the functions, and limit the memory of the process.

    Args:
        message: the config as JSON.

    Returns:
        Function that handles the later messages.
    """
    config = Config.model_validate_json(message)
    functions = find_functions(config.rollout.generator_params["functions"])
    limit = round(config.data.reward_memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def answer(message: bytes) -> str:
        """Call a function. Return its result if that is text, otherwise the result as JSON."""
        request = json.loads(message)
        result = functions[request["name"]](**json.loads(request["arguments"] or "{}"))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    return answer


if __name__ == "__main__":
    serve(prepare, lambda error: "")  # the model reads errors, which must not contain paths of this machine
