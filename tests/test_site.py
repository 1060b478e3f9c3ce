"""The docs site: it builds without a warning, its links lead somewhere, and it asks nobody but its own host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browsing import NEEDS_BROWSER

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "zensical.toml"
DOCS = ROOT / "docs"

LOADED = {"src", "srcset", "poster", "data", "action"}
"""Attributes that name what a browser loads with a page; of `href`, only that of a link element."""


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """`make docs`, in a folder that has the settings and the pages."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)


class Page(HTMLParser):
    """What a page loads, what it links to, and what can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.anchors.add(value)
            elif name in LOADED or (name == "href" and tag == "link"):
                self.loads.append(value)
            elif name == "href":
                self.links.append(value)
            elif name == "style":
                self.loads += urls_in(value)


def urls_in(css: str) -> list[str]:
    """What a style sheet loads."""
    named = re.findall(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""", css)
    return [first or second for first, second in named]


def is_elsewhere(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(CONFIG, folder)
    shutil.copytree(DOCS, folder / "docs")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def entries(nav: Any) -> Iterator[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(item)


def test_every_page_has_its_place_in_the_navigation() -> None:
    named = list(entries(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]))
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted(there), "zensical.toml: `nav` names each page of docs/ once"


def test_a_page_for_each_document(pages: dict[Path, Page], site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in pages}
    assert built == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | {"404.md"}


def test_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for bad in ("[x](nowhere.md)", "[x](#nowhere)"):
        (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{bad}\n", encoding="utf-8")
        (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\n', encoding="utf-8")
        assert build(tmp_path).returncode != 0, bad


def test_links_and_anchors_resolve(pages: dict[Path, Page], site: Path) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if is_elsewhere(link) or parts.scheme == "data":
                continue
            base = site if path.name == "404.html" else path.parent  # it is shown at any address
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            wanted = unquote(parts.fragment)
            if not target.is_file() or (wanted and target in pages and wanted not in pages[target].anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost, "\n".join(lost)


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    loaded = {path: page.loads for path, page in pages.items()}
    loaded |= {path: urls_in(path.read_text(encoding="utf-8")) for path in site.rglob("*.css")}
    found = [f"{path.relative_to(site)}: {url}" for path, urls in loaded.items() for url in urls if is_elsewhere(url)]
    assert not found, "\n".join(found)
    assert sum(map(len, loaded.values())) > 2 * len(pages)  # styles and scripts, at least


# In a browser ----------------------------------------------------------------------------------------


class Handler(SimpleHTTPRequestHandler):
    """Files, under a policy by which a browser refuses, and notes, whatever would come from elsewhere."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", "default-src 'self' data: blob: 'unsafe-inline'")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] != "INFO"]


@NEEDS_BROWSER
def test_pages_fit_a_phone(browser: Any, url: str, pages: dict[Path, Page], site: Path) -> None:
    browser.set_window_size(500, 900)  # headless Chromium's narrowest; a frame is narrower
    complaints(browser)
    browser.get(f"{url}/404.html")
    too_wide = []
    for path in pages:
        width = browser.execute_async_script(
            """
            const done = arguments[1], frame = document.createElement("iframe");
            frame.style = "position: fixed; inset: 0; width: 390px; height: 844px; border: 0";
            frame.src = arguments[0];
            frame.onload = () => {
                const width = frame.contentDocument.scrollingElement.scrollWidth;
                frame.remove();
                done(width);
            };
            document.body.append(frame);
            """,
            f"{url}/{path.relative_to(site).as_posix()}",
        )
        if width > 390:
            too_wide.append(f"{path.relative_to(site)}: {width}")
    assert not too_wide, "\n".join(too_wide)
    assert not complaints(browser)


@NEEDS_BROWSER
def test_it_finds_words_and_knows_the_dark(browser: Any, url: str) -> None:
    browser.set_window_size(1280, 860)
    complaints(browser)
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(f"{url}/index.html")
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        red = int(re.findall(r"\d+", colour)[0])
        assert (red > 200) == (scheme == "light"), colour
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.find_element(By.CSS_SELECTOR, "button.md-search__button").click()
    browser.switch_to.active_element.send_keys("DeadlineExceeded")
    results = """
        const roots = [...document.querySelectorAll("*")].flatMap(element => element.shadowRoot ?? []);
        return roots.flatMap(root => [...root.querySelectorAll("a[role=option]")].map(a => a.href));
    """
    found = WebDriverWait(browser, 20, 0.05).until(lambda _: browser.execute_script(results))
    assert f"{url}/api.html?h=DeadlineExceeded#deadlineexceeded" in found
    assert not complaints(browser)
