"""A headless Chromium, controlled through the DevTools protocol without a driver or further packages."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_SECONDS = 60.0


class Page:
    """The only tab of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self.home = ""
        """URL at which a test starts."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(
                timeout=TIMEOUT_SECONDS + 10
            )  # `until` has a shorter timeout
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._events.append(message)

    async def evaluate(self, code: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        response = await self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in response:
            raise AssertionError(f"{code}: {response['exceptionDetails']}")
        return response["result"].get("value")

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        mobile = width < 640
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        """Open a URL and wait until the page has drawn its content."""
        drawn_before = await self.evaluate("document.body ? Number(document.body.dataset.drawn ?? 0) : 0")
        same_document = await self.evaluate("location.href.split('#')[0]") == url.split("#")[0]
        if await self.evaluate("location.href") == url:  # the same URL does not trigger another drawing
            await self.evaluate("dispatchEvent(new HashChangeEvent('hashchange')) && null")
        else:
            await self.call("Page.navigate", url=url)
        await self.until(
            f"Number(document.body?.dataset.drawn ?? 0) > {drawn_before if same_document else 0}"
        )

    async def until(self, condition: str) -> None:
        code = (
            f"new Promise((resolve, reject) => {{ const end = Date.now() + {TIMEOUT_SECONDS * 1000:.0f}; "
            f"const check = () => {{ if ({condition}) resolve(true); "
            "else if (Date.now() > end) reject(new Error('timeout')); else setTimeout(check, 20); }; check(); })"
        )
        while True:
            try:
                await self.evaluate(code)
                return
            except AssertionError as e:  # the previous page was unloaded during the evaluation
                if "navigated" not in str(e) and "context" not in str(e):
                    raise

    async def text(self, selector: str = "body") -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        screenshot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(screenshot["data"]))

    @property
    def errors(self) -> list[str]:
        """Return exceptions, error messages of the console and refused requests."""
        messages = []
        for event in self._events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                messages.append(json.dumps(params["exceptionDetails"])[:300])
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                messages.append(params["entry"]["text"])
        return messages

    def clear_errors(self) -> None:
        self._events.clear()


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Start Chromium with a profile in `folder`. It can connect to 127.0.0.1 only."""
    assert CHROMIUM is not None
    profile = folder / "chromium"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--disable-background-networking", "--no-first-run", "--remote-debugging-port=0",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(folder)}
    )
    try:
        port = profile / "DevToolsActivePort"
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not (port.exists() and len(port.read_text().split()) == 2):
                assert process.poll() is None, "Chromium ended"
                await asyncio.sleep(0.05)
        base_url = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base_url}/json/list") as answer:
                (tab,) = [t for t in await answer.json() if t["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        process.terminate()
        process.wait(30)
