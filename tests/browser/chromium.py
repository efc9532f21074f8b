"""A headless Chromium, driven over its DevTools protocol: no driver program and no download of its own.

The page is asked in its own language: `evaluate` runs JavaScript in it, input goes through the protocol like a
person's, so focus, clicks and keys are the browser's own.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--autoplay-policy=no-user-gesture-required",
    "--remote-debugging-port=0",
)
_STARTS_WITHIN = 30.0
_ANSWERS_WITHIN = 20.0


def chromium_path() -> str | None:
    """The browser of this machine, if it has one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class PageError(AssertionError):
    """JavaScript failed in the page."""


class Page:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        """Every URL that was asked for."""
        self.complaints: list[str] = []
        """Errors and refusals that the browser logged, e.g. by the content security policy."""
        self._reader = asyncio.create_task(self._read())

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(_ANSWERS_WITHIN):
            reply = await answer
        if "error" in reply:
            raise PageError(f"{method}: {reply['error']['message']}")
        result: dict[str, Any] = reply["result"]
        return result

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever the page says
        """The value of an expression; promises are waited for."""
        reply = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return reply["result"].get("value")

    async def until(self, expression: str, *, timeout: float = 40.0) -> Any:  # noqa: ANN401 - as above
        """Wait for an expression to be truthy and return it."""
        deadline = time.monotonic() + timeout
        while True:
            value = await self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                text = await self.evaluate("document.body.innerText")
                raise AssertionError(f"{expression} did not come true; the page says:\n{text}\n{self.complaints}")
            await asyncio.sleep(0.1)

    async def click(self, selector: str) -> None:
        """Click on the middle of an element, as a mouse does: what covers it gets the click."""
        place = await self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e || e.disabled) return null;"
            " e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect();"
            " return r.width ? {x: r.x + r.width / 2, y: r.y + r.height / 2} : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, modifiers: int = 0) -> None:
        """Press a key: `Tab`, `Enter`; modifiers: 2 is Ctrl, 8 is Shift."""
        code = {"Tab": 9, "Enter": 13}[key]
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                **(extra if kind == "keyDown" else {}),
            )

    async def screen(self, *, width: int, height: int, dark: bool = False, mobile: bool = False) -> None:
        """Take on another kind of screen."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        await self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    async def screenshot(self, file: Path, *, whole: bool = False) -> None:
        reply = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(reply["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        with suppress(ConnectionClosed):
            async for message in self._connection:
                event = json.loads(message)
                if "id" in event:
                    answer = self._waiting.pop(event["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(event)
                else:
                    self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.complaints.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Audits.issueAdded" if params["issue"]["code"] == "ContentSecurityPolicyIssue":
                self.complaints.append(json.dumps(params["issue"]["details"]))


class Browser:
    """A running browser; every tab is a person of its own, with no storage in common."""

    def __init__(self, control: Page, address: str) -> None:
        self._control = control
        self._address = address

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Page]:
        """An empty tab."""
        person = (await self._control.send("Target.createBrowserContext"))["browserContextId"]
        target = await self._control.send("Target.createTarget", url="about:blank", browserContextId=person)
        async with _connected(f"ws://{self._address}/devtools/page/{target['targetId']}") as page:
            for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
                await page.send(f"{domain}.enable")
            yield page
        await self._control.send("Target.disposeBrowserContext", browserContextId=person)


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """Run the browser with a new empty profile."""
    path = chromium_path()
    assert path is not None
    process = await asyncio.create_subprocess_exec(
        path,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address, control = await _listening(profile)
        async with _connected(f"ws://{address}{control}") as page:
            yield Browser(page, address)
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Page]:
    async with connect(url, max_size=None) as connection:
        page = Page(connection)
        try:
            yield page
        finally:
            await page.close()


async def _listening(profile: Path) -> tuple[str, str]:
    """Address and control path of the browser, which writes them into its profile when it is ready."""
    deadline = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ValueError):
            port, path = (await asyncio.to_thread((profile / "DevToolsActivePort").read_text)).split()
            return f"127.0.0.1:{port}", path
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not start")
