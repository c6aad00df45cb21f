"""The built pages, in a browser and without one: they stand alone, fit, and lead somewhere.

``make test`` builds the book first; ``PROOFREAD_HTML`` names another build.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from proofread.notebooks import books

ROOT = Path(__file__).resolve().parents[2]
HTML = Path(os.environ.get("PROOFREAD_HTML") or ROOT / "_build" / "html")


def find_pages() -> list[str]:
    """Every built page but the theme's own templates."""
    found = (path.relative_to(HTML).as_posix() for path in HTML.rglob("*.html"))
    return sorted(name for name in found if not name.startswith("_"))


PAGES = find_pages()
SHOWN = [name for name in PAGES if name != "index.html"]  # which only leads to the first page
NOTEBOOKS = [nb.name for nb in books(ROOT)]
every_page = pytest.mark.parametrize("name", PAGES)
every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


# --- the book is there, and it is this one ------------------------------------------------------


def test_book_is_built() -> None:
    assert "book/intro.html" in PAGES, f"{HTML} has no book: run `make book` before the tests"


def test_every_document_is_built_from_what_is_here() -> None:
    """The build keeps the sources that it read: none may differ from the checkout's."""
    names = [name for name in PAGES if name.startswith("book/")]
    assert len(names) > len(NOTEBOOKS)
    for name in names:
        (copy,) = (HTML / "_sources").glob(f"{name.removesuffix('.html')}.*")
        source = ROOT / copy.relative_to(HTML / "_sources")
        assert source.is_file(), f"{name} has no source any more: run `make book`"
        assert source.read_bytes() == copy.read_bytes(), f"{name} is outdated: run `make book`"


@every_notebook
def test_every_notebook_has_its_page(name: str) -> None:
    assert f"book/chapters/{name}.html" in PAGES


# --- reading pages ------------------------------------------------------------------------------


@dataclass
class Link:
    href: str
    title: str
    download: bool
    text: str = ""
    inner: set[str] = field(default_factory=set)


class Page(HTMLParser):
    """Ids with their classes, links, images, and every address that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.classes: dict[str, set[str]] = {}
        self.links: list[Link] = []
        self.images: list[dict[str, str]] = []
        self.loads: list[str] = []
        self.scripts = ""
        self._link: Link | None = None
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        classes = set(found.get("class", "").split())
        if "id" in found:
            self.classes[found["id"]] = classes
        if tag == "a" and "href" in found:
            self._link = Link(found["href"], found.get("title", ""), "download" in found)
            self.links.append(self._link)
        elif self._link:
            self._link.inner |= classes
        if tag == "img":
            self.images.append(found)
        if tag == "link" and found.get("rel") not in ("index", "search", "next", "prev"):
            self.loads.append(found.get("href", ""))
        self.loads += [found[key] for key in ("src", "srcset", "poster", "data") if key in found]
        self._script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._link = None if tag == "a" else self._link
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._link:
            self._link.text += data
        if self._script:
            self.scripts += data


@cache
def page(name: str) -> Page:
    return Page((HTML / name).read_text("utf-8"))


def target_of(name: str, href: str) -> tuple[Path, str]:
    """The file and the anchor that a relative link leads to."""
    parts = urlsplit(href)
    path = HTML / name if not parts.path else (HTML / name).parent / unquote(parts.path)
    return path.resolve(), unquote(parts.fragment)


def outside(address: str) -> bool:
    return bool(re.match(r"\s*(?:[a-z][a-z0-9+.-]*:)?//", address, re.IGNORECASE))


# --- without a browser --------------------------------------------------------------------------


@every_page
def test_nothing_is_loaded_from_outside(name: str) -> None:
    found = page(name)
    assert [address for address in found.loads if outside(address)] == []
    assert re.findall(r"https?://[^\s\"']+", found.scripts) == []


@every_page
def test_what_is_loaded_is_there(name: str) -> None:
    for address in page(name).loads:
        if not address.startswith("data:"):
            path, _ = target_of(name, address)
            assert path.is_file(), f"{name} loads {address}, which is missing"


def test_styles_load_nothing_from_outside() -> None:
    sheets = {target_of(n, a)[0] for n in PAGES for a in page(n).loads if ".css" in a}
    assert HTML.resolve() / "_static" / "proofread.css" in sheets
    for sheet in sheets:
        text = sheet.read_text("utf-8")
        assert re.findall(r"(?:url\(|@import)\s*[\"']?\s*(?:https?:)?//[^)\"']*", text) == [], sheet


@every_page
def test_links_lead_somewhere(name: str) -> None:
    for link in page(name).links:
        if re.match(r"[a-z]+:", link.href):
            assert link.href.startswith(("https://", "mailto:")), f"{name} links {link.href}"
            continue
        path, anchor = target_of(name, link.href)
        assert path.is_file(), f"{name} links {link.href} ({link.text!r}), which is missing"
        assert path.is_relative_to(HTML.resolve()), f"{name} links {link.href}, outside the book"
        if anchor and path.suffix == ".html":
            there = page(path.relative_to(HTML.resolve()).as_posix()).classes
            assert anchor in there, f"{name} links {link.href} ({link.text!r}): no such anchor"


@every_page
def test_figures_have_alternative_text(name: str) -> None:
    for image in page(name).images:
        alt = image.get("alt", "").strip()
        assert alt, f"{name}: {image.get('src')} has no alternative text"
        assert not re.search(r"\.(png|svg|jpe?g)$|_images/|_build/", alt), f"{name}: alt is {alt!r}"
        assert len(alt) > 10, f"{name}: alt {alt!r} says too little"


@every_notebook
def test_notebook_and_source_can_be_downloaded(name: str) -> None:
    links = page(f"book/chapters/{name}.html").links
    files = {link.text: link for link in links if link.download}
    stem = name.split("/")[1]
    assert sorted(files) == [f"{stem}.ipynb", f"{stem}.md"]
    for text, link in files.items():
        path, _ = target_of(f"book/chapters/{name}.html", link.href)
        source = ROOT / "book" / "chapters" / name.split("/", maxsplit=1)[0] / text
        assert path.read_bytes() == source.read_bytes(), f"{text} is outdated: run `make book`"


def test_every_claim_has_a_square_that_leads_to_its_ruling() -> None:
    ledger = json.loads((HTML.parent / "claims.json").read_text("utf-8"))
    squares = [link for link in page("book/intro.html").links if "pr-cell" in link.inner]
    assert len(squares) == len(ledger) > 0
    for claim, square in zip(ledger, squares, strict=True):
        assert square.title == f"{claim['verdict']}: {claim['says']}"
        assert claim["verdict"] in square.text
        path, anchor = target_of("book/intro.html", square.href)
        there = page(path.relative_to(HTML.resolve()).as_posix()).classes[anchor]
        assert ("pr-ruling" if claim["result"] else "pr-claim") in there, claim["claim"]
        assert f"pr-{claim['verdict'].replace(' ', '-')}" in there, claim["claim"]


def test_every_badge_leads_to_a_ruling() -> None:
    badges = [(n, link) for n in PAGES for link in page(n).links if "pr-badge" in link.inner]
    assert badges
    for name, link in badges:
        path, anchor = target_of(name, link.href)
        there = page(path.relative_to(HTML.resolve()).as_posix()).classes[anchor]
        assert "pr-ruling" in there, f"{name} links {link.href}"


# --- in a browser -------------------------------------------------------------------------------

WIDTHS = {1300: "light", 400: "dark"}

#: What a reader cannot reach: elements beyond the window or cut off by a box that does not scroll.
STICKS_OUT = """() => {
  const aside = ".bd-sidebar-secondary, .pr-words, mjx-assistive-mml";
  const found = [];
  for (const e of document.querySelectorAll("main *, footer *")) {
    const box = e.getBoundingClientRect();
    if (e.closest(aside) || !box.width || !box.height) continue;
    let edge = innerWidth, scrolls = false, up = e.parentElement;
    for (; up && up !== document.body; up = up.parentElement) {
      const overflow = getComputedStyle(up).overflowX;
      if (scrolls = overflow === "auto" || overflow === "scroll") break;
      if (overflow !== "visible") edge = Math.min(edge, up.getBoundingClientRect().right);
    }
    if (!scrolls && box.right > edge + 1)
      found.push(`${e.tagName}.${e.getAttribute("class")}: ${e.textContent.trim().slice(0, 60)}`);
  }
  return found.slice(0, 5);
}"""

#: Mathematics that is not typeset: errors, formulas left as text, delimiters in the prose.
UNTYPESET = r"""() => {
  const found = [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map(
    e => e.getAttribute("data-mjx-error") || e.textContent);
  for (const e of document.querySelectorAll("main .math"))
    if (!e.querySelector("mjx-container")) found.push("not typeset: " + e.textContent);
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode;
    if (e.parentElement.closest("pre, code, script, style, mjx-container")) continue;
    if (/\$\$|\\\(|\\\[|\\begin\{/.test(e.data)) found.push("raw: " + e.data.trim().slice(0, 80));
  }
  return found;
}"""

BROKEN_IMAGES = """() => [...document.images].filter(i => !i.complete || !i.naturalWidth)
  .map(i => i.src)"""


@pytest.fixture(scope="session")
def browser(chromium_path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=str(chromium_path), args=arguments)
        yield started
        started.close()


@dataclass
class Visit:
    """A page that is open, with what it complained about and what it asked for."""

    tab: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, name: str) -> None:
        self.tab.on("console", self._hear)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("requestfailed", lambda r: self.complaints.append(f"failed: {r.url}"))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto((HTML / name).resolve().as_uri(), wait_until="load")
        if self.tab.query_selector("script[src*='mathjax']"):
            self.tab.wait_for_function("() => window.MathJax?.startup?.promise", timeout=15_000)
            self.tab.evaluate("() => MathJax.startup.promise.then(() => true)")

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture(params=WIDTHS, ids=lambda width: f"{width}px")
def visit(browser: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A fresh tab: wide and light, narrow and dark."""
    context = browser.new_context(
        viewport={"width": request.param, "height": 900}, color_scheme=WIDTHS[request.param]
    )
    yield Visit(context.new_page())
    context.close()


@pytest.mark.browser
@pytest.mark.parametrize("name", SHOWN)
def test_page_in_a_browser(name: str, visit: Visit) -> None:
    visit.open(name)
    tab = visit.tab
    assert visit.complaints == [], f"{name}: the console is not clean"
    allowed = ("file:", "data:", "blob:")
    assert [url for url in visit.requests if not url.startswith(allowed)] == [], "asks outside"
    width = tab.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], f"{name}: {width[0]} px of content in a window of {width[1]} px"
    assert tab.evaluate(STICKS_OUT) == [], f"{name}: sticks out of the window"
    assert tab.evaluate(UNTYPESET) == [], f"{name}: mathematics"
    assert tab.evaluate(BROKEN_IMAGES) == [], f"{name}: images that do not load"
    theme = tab.evaluate("() => document.documentElement.dataset.theme")
    assert theme == WIDTHS[tab.viewport_size["width"]], f"{name}: not in the reader's colours"


@pytest.mark.browser
def test_first_address_leads_to_the_first_page(visit: Visit) -> None:
    visit.tab.goto((HTML / "index.html").resolve().as_uri())
    visit.tab.wait_for_url("**/book/intro.html")
    assert visit.tab.inner_text("h1").startswith("Proofread")


@pytest.mark.browser
def test_equations_are_there(browser: Any) -> None:
    """The check above would pass on a page whose mathematics was lost."""
    names = [n for n in PAGES if 'class="math' in (HTML / n).read_text("utf-8")]
    assert any(n.startswith("book/chapters/") for n in names)
    tab = browser.new_page()
    visit = Visit(tab)
    visit.open(next(n for n in names if n.startswith("book/chapters/")))
    assert tab.locator("mjx-container").count() > 0
    tab.close()


@pytest.mark.browser
def test_search_works_without_a_network(visit: Visit) -> None:
    visit.open("search.html")
    visit.tab.goto((HTML / "search.html").resolve().as_uri() + "?q=verdict")
    visit.tab.wait_for_selector("#search-results li a", timeout=15_000)
    assert visit.complaints == []


@pytest.mark.browser
def test_square_jumps_to_the_ruling(browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 1300, "height": 900})
    tab.goto((HTML / "book/intro.html").resolve().as_uri())
    tab.click("a:has(.pr-cell) >> nth=0")
    tab.wait_for_url("**#claim-*")
    where = f"document.getElementById('{tab.url.split('#')[1]}').getBoundingClientRect().y"
    tab.wait_for_function(f"() => {where} >= 0 && {where} < 900", timeout=10_000)
    tab.close()
