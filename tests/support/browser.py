"""Pages in Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
_READY = "document.documentElement.dataset.ready === 'yes'"


class Opened:
    """An open page whose script is ready. `complaints` are console errors, exceptions, and policy violations."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page, self.complaints = page, list[str]()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._heard)
        self._protocol = page.context.new_cdp_session(page)
        self._protocol.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(file.as_uri())
        page.wait_for_function(_READY)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def cpu_seconds(self) -> float:
        """Return the total time of the page's tasks on its thread."""
        metrics = self._protocol.send("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression or await its promise."""
        return self.page.evaluate(expression)

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)


Opener = Callable[..., Opened]


@contextmanager
def browsing(folder: Path) -> Iterator[Opener]:
    """Start a browser; skip the test without one.

    Yields a function that opens the HTML of a page, in a window of `width` pixels, light or `dark`.
    """
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    from playwright.sync_api import sync_playwright

    file = folder / "page.html"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])

        def opened(made: str, *, width: int = 1280, dark: bool = False) -> Opened:
            for context in browser.contexts:
                context.close()
            file.write_text(made, encoding="utf-8")
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
            )
            return Opened(context.new_page(), file)

        yield opened
        browser.close()


# A function of a page: every text, control and focused control with too little contrast (WCAG 2.2, 1.4.3 and
# 1.4.11), and elements that the tab key does not reach. A text is compared with the colour beneath it.
CONTRASTS = """
const numbers = (text) => (text.match(/[0-9.]+(e-?[0-9]+)?/g) || []).map(Number);
function colour(text) {  // red, green and blue from 0 to 1, and how opaque
  const found = numbers(text.replace("srgb", ""));
  const scale = text.startsWith("color(") ? 1 : 255;
  return [...found.slice(0, 3).map((one) => one / scale), found.length > 3 ? found[3] : 1];
}
const over = (above, below) => [0, 1, 2].map((n) => above[n] * above[3] + below[n] * (1 - above[3])).concat(1);
function luminance(one) {
  const [red, green, blue] = one.slice(0, 3).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
function contrast(one, two) {
  const [dark, light] = [luminance(one), luminance(two)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}
function ground(element) {  // what is painted behind an element's content
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(colour(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((below, above) => over(above, below), [1, 1, 1, 1]);
}
function behind(text) {  // of a text in a drawing: the shape under its middle, or the drawing's ground
  text.scrollIntoView({ block: "center" });
  const box = text.getBoundingClientRect();
  const found = document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  const shape = found.find((one) => one.matches("rect, polygon, path") && getComputedStyle(one).fill !== "none");
  const below = ground(text.closest("svg").parentElement);
  return shape ? over(colour(getComputedStyle(shape).fill), below) : below;
}
function told(element, what, ratio) {
  return `${what} ${ratio.toFixed(2)} ${element.tagName}.${element.getAttribute("class") || element.id} `
    + (element.textContent || "").trim().slice(0, 20);
}
function contrasts() {
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.getClientRects().length || one.matches("script, style, title, option")) continue;
    const style = getComputedStyle(one), drawn = one.closest("svg");
    const below = drawn ? behind(one) : ground(one);
    const ratio = contrast(over(colour(drawn ? style.fill : style.color), below), below);
    if (ratio < 4.5) poor.push(told(one, "text", ratio));
  }
  for (const one of document.querySelectorAll("button, select, input, summary, [tabindex]")) {
    if (!one.getClientRects().length) continue;
    const style = getComputedStyle(one), around = ground(one.parentElement);
    if (style.borderTopStyle === "solid" && style.borderTopWidth !== "0px") {
      const ratio = contrast(over(colour(style.borderTopColor), around), around);
      if (ratio < 3) poor.push(told(one, "edge", ratio));
    }
    one.focus({ focusVisible: true });
    if (document.activeElement !== one) poor.push(told(one, "not reached", 0));
    const shown = getComputedStyle(one);
    const ratio = shown.outlineStyle === "none" ? 0 : contrast(over(colour(shown.outlineColor), around), around);
    if (ratio < 3) poor.push(told(one, "focus", ratio));
  }
  return poor;
}
"""
