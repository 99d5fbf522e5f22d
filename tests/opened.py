"""A page in a real browser: real time, key presses, console messages, and printing.

Controls Chromium by its DevTools protocol through two pipes, so that nothing more has to be installed.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM

_READY = """new Promise((resolve) => {
  const look = () => (document.documentElement?.dataset.ready === "yes" ? resolve(true) : setTimeout(look, 5));
  look();
})"""


class Opened:
    """An open page. `complaints` are console errors, exceptions, and policy violations."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._number, self._rest = to_browser, from_browser, 0, b""
        self.complaints: list[str] = []
        self._session: str | None = None

    def load(self, file: Path, *, width: int = 1280) -> None:
        """Open a file, and wait until its script is ready."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")
        self.ask("Performance.enable", timeDomain="threadTicks")
        self.ask("Page.navigate", url=file.as_uri())
        self.evaluate(_READY)

    def cpu_seconds(self) -> float:
        """Return the total time of the page's tasks on its thread."""
        told = self.ask("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in told if one["name"] == "TaskDuration")

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression or await its promise."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after the other, as a keyboard does."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": 9} if key == "Tab" else {}
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def printed(self) -> bytes:
        """Print the page on A4 as a PDF."""
        return base64.b64decode(self.ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; search events in between for complaints."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        asked |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while (told := self._told()).get("id") != self._number:
            self._note(told)
        assert "error" not in told, told
        answer: dict[str, Any] = told["result"]
        return answer

    def _told(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        match told:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(str(details.get("exception", details)))
            case {
                "method": "Runtime.consoleAPICalled",
                "params": {"type": "error" | "warning" | "assert", "args": args},
            }:
                self.complaints.append(str(args))
            case {
                "method": "Log.entryAdded",
                "params": {"entry": {"level": "error" | "warning", "text": text}},
            }:
                self.complaints.append(text)


@contextmanager
def opened(folder: Path) -> Iterator[Opened]:
    """Open a browser without a page; skip the test without a browser."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    (to_browser, our_to), (our_from, from_browser) = os.pipe(), os.pipe()
    ends = to_browser, from_browser
    command = [
        "bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "-",  # the protocol's places for its pipes
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'opened'}",
        "--remote-debugging-pipe",
    ]  # fmt: skip
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, pass_fds=ends, stdout=quiet, stderr=quiet) as process:
        for end in ends:
            os.close(end)
        page = Opened(our_to, our_from)
        try:
            yield page
        finally:
            process.kill()
            for end in (our_to, our_from):
                os.close(end)
