"""A headless Chromium, controlled over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.waiting import until

UNPACKED = Path.home() / ".cache/bough/chromium"  # by .ci/run, where the system has none
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, (shutil.which(n) or shutil.which(n, path=UNPACKED) for n in NAMES)), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900")
POLL_SECONDS = 0.05

Json = dict[str, Any]


class Page:
    """The one page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []  # errors in the page's console
        self._socket = socket
        self._num_calls = 0

    async def open(self, url: str) -> None:
        """Load a page, whose errors are noted from then on."""
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)
        await self.until("document.readyState == 'complete' && location.href != 'about:blank'")

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of the promise that it is."""
        reply = await self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        await until(lambda: self.value(condition))

    async def texts(self, selector: str) -> list[str]:
        """What can be read in the elements."""
        texts: list[str] = await self.value(f"Array.from(document.querySelectorAll({selector!r}), e => e.innerText)")
        return texts

    async def click(self, selector: str) -> None:
        """Click with a mouse in an element's middle."""
        await self.value(f"document.querySelector({selector!r}).scrollIntoView()")
        box = await self.value(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            await self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    async def fill(self, selector: str, text: str) -> None:
        """Type over what an element holds."""
        await self.click(selector)
        await self.value(f"document.querySelector({selector!r}).select()")
        await self._call("Input.insertText", text=text)

    async def press_enter(self, *, with_shift: bool = False) -> None:
        """Press and release the Enter key where the focus is."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8 if with_shift else 0}
        await self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        await self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def picture(self) -> bytes:
        """What is seen, as a PNG."""
        return base64.b64decode((await self._call("Page.captureScreenshot"))["data"])

    async def _call(self, method: str, **params: Any) -> Json:
        self._num_calls += 1
        await self._socket.send_json({"id": self._num_calls, "method": method, "params": params})
        while True:
            message: Json = await self._socket.receive_json()
            if message.get("id") == self._num_calls:
                assert "error" not in message, (method, message["error"])
                result: Json = message["result"]
                return result
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, params: Json) -> None:
        is_error = (
            event == "Runtime.exceptionThrown"
            or (event == "Runtime.consoleAPICalled" and params["type"] == "error")
            or (event == "Log.entryAdded" and params["entry"]["level"] == "error")
        )
        if is_error:
            self.problems.append(json.dumps(params))


@asynccontextmanager
async def browser_page(folder: Path) -> AsyncIterator[Page]:
    """Run a browser, which keeps its files in `folder`, during the block."""
    assert BROWSER is not None
    command = (BROWSER, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank")
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    try:
        told = folder / "DevToolsActivePort"
        await until(lambda: process.returncode is not None or (told.exists() and told.read_text().count("\n")))
        assert process.returncode is None, f"{BROWSER} ended with {process.returncode}"
        address = f"http://127.0.0.1:{told.read_text().split()[0]}"
        async with aiohttp.ClientSession(trust_env=False) as client:
            async with client.get(f"{address}/json/list") as reply:
                (page,) = [one for one in await reply.json() if one["type"] == "page"]
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
