"""A real Chromium without a window, spoken to over its DevTools protocol: what a page draws, says and asks for."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Path of the first Chromium there is."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page. Errors, warnings and requests are kept as they come."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=PATIENCE_S, suppress_origin=True)
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are noted. RuntimeError if the browser refuses."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Loads a page at a size and waits until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + PATIENCE_S
        while "Page.loadEventFired" not in self._events:
            if time.monotonic() > until:
                raise TimeoutError(f"{url} is not loaded after {PATIENCE_S} s")
            self._receive()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives. RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """One key, as from a keyboard."""
        for kind in ("rawKeyDown", "char", "keyUp"):
            text = "\r" if key == "Enter" and kind == "char" else ""
            if kind == "char" and not text:
                continue
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, or of what the window shows."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv())
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return dict(message)


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, ended afterwards.

    profile  empty folder for its files
    """
    profile.mkdir(parents=True, exist_ok=True)
    command = [
        executable,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-features=BackForwardCache",
        "--no-first-run",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    with open(profile / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HOME": str(profile)})
    tab = None
    try:
        tab = Tab(_address(process, profile))
        yield tab
    finally:
        if tab is not None:
            tab.close()
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], profile: Path) -> str:
    """Where the first tab listens; the browser writes its port into its profile."""
    import urllib.request

    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        try:
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        except (OSError, IndexError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the browser did not start: {(profile / 'log').read_text(errors='replace')[-2000:]}")
