"""The page, in a browser: the chat, the lanes, and how it looks on a small screen."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from browsing import NEEDS_BROWSER
from serving import CHAT, Host, held

pytestmark = [pytest.mark.timeout(150), NEEDS_BROWSER]


class Page:
    """The page of a server, open in a browser."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        driver.get(url)
        driver.execute_script("localStorage.clear()")
        driver.get(url)

    def at(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 30, 0.05).until(lambda _: condition())

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def set(self, field: str, value: str) -> None:
        """Give a field of the options a value, as a user would."""
        self.run("document.querySelector('details').open = true")
        self.at(f"#{field}").clear()
        self.at(f"#{field}").send_keys(value)

    def ask(self, question: str) -> None:
        self.until(lambda: self.at("#send").is_displayed())
        self.at("#question").send_keys(question, Keys.ENTER)

    def answer(self) -> str:
        """The last answer, when it is complete."""
        self.until(lambda: self.at("#send").is_displayed() and not self.all(".writing"))
        return self.run("return [...document.querySelectorAll('.assistant .words')].at(-1).textContent")


@pytest.fixture
def page(browser: webdriver.Chrome, serve_host: Host) -> Iterator[Page]:
    browser.set_window_size(1280, 860)
    url = serve_host.tell(open={"grace_s": 1.0, "queue": 1})["url"]
    try:
        yield Page(browser, url)
        errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        # A refusal is an answer that the browser notes as an error; the page shows it.
        assert not [entry for entry in errors if " 429 " not in entry["message"]]
    finally:
        browser.get("about:blank")
        serve_host.tell(close=url)
        serve_host.tell(ended=url)


def told(url: str, *contents: str, max_tokens: int) -> str:
    """What the server answers without a browser."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    body = {"model": CHAT, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


def test_a_conversation(page: Page) -> None:
    page.until(lambda: page.at("#connection").text == "connected")
    page.until(lambda: page.at("#model").text == CHAT)
    page.set("temperature", "0")
    page.set("max-tokens", "10")
    page.ask("Hi")
    first = page.answer()
    assert first == told(page.url, "Hi", max_tokens=10)
    assert page.at(".user .words").text == "Hi" and page.at(".assistant .note").text.startswith("10 tokens")
    page.ask("More")
    assert page.answer() == told(page.url, "Hi", first, "More", max_tokens=10)
    page.at("#new").click()
    assert not page.all(".turn") and page.at("#empty").is_displayed()
    page.at(".idea").click()
    assert page.answer() and len(page.all(".turn")) == 2


def test_stopping(page: Page, serve_host: Host) -> None:
    with held(serve_host):
        page.ask("Hi")
        page.until(lambda: page.at("#stop").is_displayed())
        page.at("#stop").click()
        page.until(lambda: page.at(".assistant .note").text == "stopped")
        metrics = httpx.get(f"{page.url}/metrics").text
        page.until(lambda: 'aiopipe_texts{state="waiting"} 0.0' in httpx.get(f"{page.url}/metrics").text)
        assert 'kind="written"' not in metrics


def test_being_refused(page: Page, serve_host: Host) -> None:
    with held(serve_host):
        page.until(lambda: page.at("#model").text == CHAT)
        body = json.dumps({"model": CHAT, "prompt": "a"})
        others = [http.client.HTTPConnection(page.url.removeprefix("http://")) for _ in range(5)]
        for other in others:
            other.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        page.until(lambda: page.at("#waiting").text == "5")  # four rows, and one that waits
        page.ask("Hi")
        page.until(lambda: page.all(".failed"))
        assert "1 texts are waiting already" in page.at(".failed .note").text
        assert "Try again in" in page.at(".failed .note").text
        for other in others:
            other.close()
        page.until(lambda: page.at("#waiting").text == "0")


PAINTED = """
    return [...document.querySelectorAll('canvas')].map(canvas =>
        canvas.getContext('2d').getImageData(0, canvas.height / 2, canvas.width, 1).data
            .filter((value, i) => i % 4 == 3 && value > 0).length)
"""


def test_the_lanes_show_the_devices_at_work(page: Page) -> None:
    page.until(lambda: len(page.all(".lane")) == 2)
    assert [name.text for name in page.all(".lane .name")] == ["cpu:0", "cpu:1"]
    page.until(lambda: page.at("#writing").text == "0 / 4" and page.at("#waiting").text == "0")
    page.run("document.querySelector('#others').value = 4")
    page.run("document.querySelector('#others').dispatchEvent(new Event('input'))")
    page.until(lambda: page.at("#writing").text != "0 / 4")
    page.until(lambda: min(page.run(PAINTED)) > 20)  # more than the lines of the seconds
    page.until(lambda: page.at("#steps").text not in ("–", "0.0"))
    for lane in page.all(".lane canvas"):
        assert "busy for" in lane.get_attribute("aria-label")
    page.run("document.querySelector('#others').value = 0")
    page.run("document.querySelector('#others').dispatchEvent(new Event('input'))")


def test_pointing_at_a_block_holds_the_picture_and_says_what_it_is(page: Page) -> None:
    legend = page.at("#legend").text
    page.set("max-tokens", "60")
    page.ask("Hi")
    page.until(lambda: page.all(".lane") and min(page.run(PAINTED)) > 20)
    canvas = page.at(".lane canvas")

    def pointed() -> str:
        """Along the lane, until there is a block; the pointer stays in it."""
        for x in range(-canvas.rect["width"] // 2 + 2, canvas.rect["width"] // 2 - 2, 4):
            ActionChains(page.driver, duration=0).move_to_element_with_offset(canvas, x, 0).perform()
            if page.at("#legend").text.startswith("Step"):
                break
        return str(page.at("#legend").text)

    found = page.until(lambda: re.fullmatch(r"Step \d+ of texts, part 1: \d+\.\d ms", pointed()))
    before = page.run("return document.querySelector('.lane canvas').toDataURL()")
    page.answer()
    assert page.run("return document.querySelector('.lane canvas').toDataURL()") == before
    assert page.at("#legend").text == found[0]
    ActionChains(page.driver, duration=0).move_to_element(page.at("h1")).perform()
    page.until(lambda: page.at("#legend").text == legend)


@pytest.mark.parametrize(("width", "height"), [(360, 740), (768, 1024), (1280, 860)])
def test_it_fits_every_screen(page: Page, width: int, height: int) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800},
    )
    try:
        page.until(lambda: len(page.all(".lane")) == 2)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert page.run("return document.documentElement.scrollHeight <= innerHeight")
        for selector in ("#question", "#send", "canvas", "#writing"):
            box = page.at(selector).rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, selector
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, selector
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_light_and_dark(page: Page) -> None:
    def brightness() -> int:
        colour = page.run("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    before = brightness()
    page.at("#theme").click()
    assert abs(brightness() - before) > 400
    after = brightness()
    page.driver.get(page.url)
    assert brightness() == after  # it is remembered


def test_everything_has_a_name(page: Page) -> None:
    """What a reader of the screen would say of each control."""
    page.run("document.querySelector('details').open = true")
    for control in page.all("button, input, textarea, canvas, [role=log]"):
        if control.is_displayed():
            assert control.accessible_name, control.get_attribute("outerHTML")


def test_it_asks_nobody_else() -> None:
    static = Path(__file__).resolve().parent.parent / "examples" / "serve" / "static"
    files = [path for path in static.iterdir() if path.suffix in (".html", ".css", ".js")]
    assert len(files) >= 5
    for path in files:
        assert "//" not in path.read_text("utf-8").replace("// ", "").replace("http://www.w3.org", "")
