"""A real Chromium for the page's tests, driven over the WebDriver protocol with the standard library alone.

Needs Debian's `chromium` and `chromium-driver`; installs them where apt-get may, and says so loudly where it may not.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class NoBrowser(Exception):
    """There is no Chromium and it could not be installed."""


def installed() -> tuple[str, str]:
    """The paths of Chromium and its driver, installed first where that is possible."""
    if not _found() and shutil.which("apt-get") and os.geteuid() == 0:
        with (Path(tempfile.gettempdir()) / "fulltilt-chromium.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
            _install()
    found = _found()
    if found is None:
        raise NoBrowser("the page was NOT tested in a browser: apt-get install chromium chromium-driver")
    return found


def _install() -> None:
    if _found():
        return
    wanted = ["chromium", "chromium-driver", "fonts-dejavu-core"]
    for command in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["apt-get", *command], capture_output=True, timeout=300, check=False)


def _found() -> tuple[str, str] | None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


class Browser:
    """One browser window. Every message of the console and every request is kept."""

    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def open(self, url: str) -> None:
        self._post("url", {"url": url})
        self.is_loaded()

    def is_loaded(self, patience_s: float = 20.0) -> bool:
        """Whether the page is complete, at once or, on a busy machine, within some seconds."""
        deadline = time.monotonic() + patience_s
        while self.run("return document.readyState") != "complete":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self._post("execute/sync", {"script": script, "args": []})

    def screen(self, width: int, height: int = 900, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window, and the reader's choice of light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def devtools(self, command: str, arguments: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": arguments})

    def picture(self, path: Path) -> bytes:
        """A picture of the whole page, also written to ``path``."""
        answer = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
        data = base64.b64decode(answer["data"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return data

    def console(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._post("se/log", {"type": "performance"})]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def alert(self) -> str | None:
        """The text of an open alert."""
        try:
            return str(self._get("alert/text"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call(f"{self._session}/{path}", body)

    def _get(self, path: str) -> Any:
        return _call(f"{self._session}/{path}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A new headless Chromium with an empty profile, gone afterwards."""
    chromium, driver = installed()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "unhandledPromptBehavior": "ignore",
        }
        try:
            _wait_until_ready(address)
            session = _call(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                yield Browser(address, session)
            finally:
                _call(f"{address}/session/{session}", method="DELETE")
        finally:
            process.terminate()
            process.wait(10)


def _wait_until_ready(address: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if _call(f"{address}/status")["ready"]:
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _call(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=120) as answer:
        return json.load(answer)["value"]
