"""The fence before an engine: only the push that was begun last brings weights."""

from __future__ import annotations

from typing import Any

import pytest

from rlsys.engine.fence import HEADER, Fence


class Served:
    """The application behind the fence; the status of each answer."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self._fence = Fence(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def post(self, path: str, epoch: str | None) -> int:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        async def receive() -> Any:
            raise AssertionError("nobody reads the body")

        headers = [] if epoch is None else [(HEADER.encode(), epoch.encode())]
        await self._fence({"type": "http", "path": path, "headers": headers}, receive, send)
        status: int = messages[0]["status"]
        return status


PATHS = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
    "/end_weight_update",
)


@pytest.mark.parametrize("path", PATHS)
async def test_an_older_push_is_refused_from_the_next_begin_on(path: str) -> None:
    served = Served()
    assert await served.post("/begin_weight_update", "1") == 200
    assert await served.post(path, "1") == 200
    assert await served.post("/begin_weight_update", "2") == 200
    assert await served.post(path, "1") == 409
    assert await served.post(path, "2") == 200
    assert served.passed == ["/begin_weight_update", path, "/begin_weight_update", path]


@pytest.mark.parametrize("path", PATHS)
async def test_a_push_not_begun_at_this_engine_is_refused(path: str) -> None:
    """The engine has been restarted since."""
    assert await Served().post(path, "1") == 409


async def test_other_calls_and_calls_of_no_run_pass() -> None:
    served = Served()
    await served.post("/begin_weight_update", "2")
    assert await served.post("/update_weights_from_disk", None) == 200
    for path in ("/generate", "/destroy_weights_update_group", "/abort_request", "/update_weight_version"):
        assert await served.post(path, "1") == 200
