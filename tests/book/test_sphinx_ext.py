"""The directives, the run line and the theme's mends, on small books rendered in this process."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import docutils_namespace

from proofread import sphinx_ext
from proofread.claims import MIME, VERDICTS, ClaimsFile, Ruling, Span, judge

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RULED = {
    "unit": "ratio",
    "accept": ">= 1",
    "refute": "< 0.9",
    "scale": {"paper": "every x", "book": "every x", "reduced": False},
}
CLAIMS: dict[str, Any] = {
    "paper": {"title": "A <b>Title", "authors": ["Ada", "Bob"], "venue": "ICML", "arxiv": "1.2"},
    "summary": "What it is about.",
    "claims": [
        {
            "id": "held",
            "quote": "a rate of $O(1/T)$ and *2.6\\%* more",
            "source": "abstract, v1",
            "says": "It is <i>at least</i> one.",
            "kind": "rate",
            "measure": "the smallest ratio",
            "control": {"halved": {"change": "half of it", "expect": "[0, 0.6]"}},
            "ruled_in": "theory",
            **RULED,
        },
        {
            "id": "not-held",
            "quote": "always",
            "source": "abstract, v1",
            "says": "It is never small.",
            "kind": "rate",
            "measure": "the largest ratio",
            "control": {"doubled": {"change": "twice it", "expect": "[1, 2]"}},
            "ruled_in": "experiments",
            **RULED,
        },
        {"id": "later", "quote": "q", "source": "s", "says": "Later.", "kind": "rate"},
        {
            "id": "no-data",
            "quote": "q",
            "source": "s",
            "says": "On secret data.",
            "kind": "rate",
            "needs": "the secret data",
        },
    ],
}
MEASURED = {
    "theory": ("held", 1.25, {"halved": 0.5}),
    "experiments": ("not-held", 0.5, {"doubled": 1.5}),
}


@dataclass(frozen=True)
class Small:
    """A small book and how to render it."""

    root: Path

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    def pair(self, stem: str, slug: str = "demo", stamped: bool = True) -> None:
        """A source and an executed pair that rules on one claim, written by hand."""
        claim_id, value, controls = MEASURED[stem]
        claim = ClaimsFile.model_validate(CLAIMS)[claim_id]
        span, spans = Span.of(value), {name: Span.of(c) for name, c in controls.items()}
        ruling = Ruling(slug, claim, span, spans, *judge(claim, span, spans))
        data = {MIME: ruling.record(), "text/html": ruling._repr_html_(), "text/plain": "r"}
        shown = nbformat.v4.new_output("execute_result", data, execution_count=1)
        text = f"# Title of {stem}\n\n" + ("```{claims} demo\n```\n" if stem == "theory" else "")
        cells = [
            nbformat.v4.new_markdown_cell(text),
            nbformat.v4.new_code_cell("n = 3", metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell("secret = 4", metadata={"tags": ["injected-parameters"]}),
            nbformat.v4.new_code_cell("rule()", outputs=[shown], execution_count=1),
        ]
        stamp = {
            "claims_commit": COMMIT,
            "fingerprint": {"pins": {"numpy": "2.4.6"}},
            "run": {
                "seconds": 12.3,
                "peak_mb": 410,
                "python": "3.11.2",
                "machine": "Linux x, 2 CPUs",
            },
        }
        metadata = {"language_info": {"name": "python"}}
        metadata |= {"proofread": stamp} if stamped else {}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
        self.write(f"book/chapters/{slug}/{stem}.md", f"# Title of {stem}\n")
        self.write(f"book/chapters/{slug}/{stem}.ipynb", nbformat.writes(notebook))

    def claims(self, content: dict[str, Any], slug: str = "demo") -> None:
        self.write(f"book/chapters/{slug}/claims.yml", yaml.safe_dump(content))

    def build(self, builder: str = "html", keep_going: bool = False) -> tuple[str, int]:
        """Warnings and the number of pages read."""
        warnings, out = io.StringIO(), self.root / "_build" / builder
        conf = {
            "root_doc": "book/intro",
            "extensions": ["myst_nb", "proofread.sphinx_ext"],
            "exclude_patterns": ["_build", "book/chapters/**/*.md"],
            "nb_execution_mode": "off",
            "myst_enable_extensions": ["dollarmath"],
            "html_theme": "basic",
            "nitpicky": True,
        }
        read: list[str] = []
        with docutils_namespace():
            app = Sphinx(
                self.root,
                None,
                out,
                self.root / "_build" / "doctrees",
                builder,
                conf,
                status=None,
                warning=warnings,
                warningiserror=keep_going,
                keep_going=keep_going,
            )
            app.connect("source-read", lambda _app, docname, _text: read.append(docname))
            app.build()
        return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue()), len(read)

    def page(self, name: str) -> Page:
        made = Page()
        made.feed((self.root / "_build" / "html" / f"{name}.html").read_text("utf-8"))
        return made


class Page(HTMLParser):
    """What the tests look at: text, links with their text, titles and classes, ids."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.ids = "", set[str]()
        self.links: list[dict[str, str]] = []
        self.inside: dict[str, str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.ids |= {found["id"]} if "id" in found else set()
        if tag == "a":
            self.inside = {"text": "", "inner": "", **found}
            self.links.append(self.inside)
        elif self.inside is not None:
            self.inside["inner"] += " " + found.get("class", "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self.inside = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.inside is not None:
            self.inside["text"] += data

    def find(self, inner: str) -> list[dict[str, str]]:
        return [link for link in self.links if inner in link["inner"].split()]


def write_small(root: Path) -> Small:
    """One chapter: a claim that held, one refuted, one planned, one blocked."""
    small = Small(root)
    small.write("_toc.yml", "format: jb-book\nroot: book/intro\n")
    contents = "\n```{toctree}\n:glob:\n*\nchapters/demo/*\n```\n"
    small.write("book/intro.md", f"# First\n\n```{{claims}}\n:view: matrix\n```\n{contents}")
    small.write("book/ledger.md", "# Ledger\n\n```{claims}\n```\n")
    small.write("book/machine.md", "# Machine\n\n```{environment}\n```\n")
    small.claims(CLAIMS)
    small.pair("theory")
    small.pair("experiments")
    return small


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Small:
    small = write_small(tmp_path_factory.mktemp("small"))
    warnings, _ = small.build()
    assert warnings == ""
    return small


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return write_small(tmp_path)


# --- what the pages show ------------------------------------------------------------------------


def test_matrix_has_a_linked_cell_per_claim_in_the_papers_order(rendered: Small) -> None:
    cells = rendered.page("book/intro").find("pr-cell")
    assert [cell["text"][0] for cell in cells] == ["✔", "✘", "·", "⊘"]
    assert [cell["href"] for cell in cells] == [
        "chapters/demo/theory.html#claim-demo-held",
        "chapters/demo/experiments.html#claim-demo-not-held",
        "ledger.html#ledger-demo-later",
        "ledger.html#ledger-demo-no-data",
    ]


def test_matrix_says_in_words_what_it_shows_in_colour(rendered: Small) -> None:
    first = rendered.page("book/intro").find("pr-cell")[0]
    words = "verified: It is <i>at least</i> one."
    assert first["text"] == f"✔ {words}"
    assert first["title"] == words
    assert "pr-verified" in first["inner"].split()


def test_matrix_counts_and_explains_every_verdict(rendered: Small) -> None:
    text = rendered.page("book/intro").text
    assert "1 paper; 4 claims: 1 verified, 1 refuted, 1 blocked, 1 planned." in text
    for verdict in VERDICTS:
        assert sphinx_ext.MEANINGS[verdict].replace("'", "’") in text


@pytest.mark.parametrize("page", ["book/chapters/demo/theory", "book/chapters/demo/experiments"])
def test_links_land(rendered: Small, page: str) -> None:
    stem = page.rsplit("/", 1)[1]
    assert f"claim-demo-{MEASURED[stem][0]}" in rendered.page(page).ids


def test_ledger_shows_the_rule_and_the_value(rendered: Small) -> None:
    page = rendered.page("book/ledger")
    for fact in (
        "A <b>Title",
        "Ada, Bob · ICML · arXiv 1.2",
        "measured",
        "1.25 (ratio)",
        "accept ≥ 1; refute < 0.9",
        "at the paper’s scale",
        "0.5, expected [0, 0.6] — half of it",
        "1.5, expected [1, 2] — twice it",
        COMMIT[:10],
        "the secret data",
        "no rules yet",
        "— abstract, v1",
    ):
        assert fact in page.text, fact
    assert COMMIT[:11] not in page.text
    assert {"ledger-demo-later", "ledger-demo-no-data"} <= page.ids


def test_quote_keeps_its_mathematics_and_emphasis(rendered: Small) -> None:
    html = (rendered.root / "_build/html/book/ledger.html").read_text("utf-8")
    assert re.search(r'class="math[^"]*">\\\(O\(1/T\)\\\)<', html)
    assert "<em>2.6%</em>" in html


def test_nothing_from_the_claims_file_is_markup(rendered: Small) -> None:
    for name in ("intro", "ledger", "chapters/demo/theory"):
        html = (rendered.root / f"_build/html/book/{name}.html").read_text("utf-8")
        assert "<i>at least" not in html
        assert "<b>Title" not in html


def test_box_stands_in_the_chapter(rendered: Small) -> None:
    page = rendered.page("book/chapters/demo/theory")
    assert [link["href"] for link in page.find("pr-badge")] == [
        "#claim-demo-held",
        "experiments.html#claim-demo-not-held",
    ]
    assert "On secret data." in page.text


@pytest.mark.parametrize("stem", MEASURED)
def test_run_line_downloads_and_tells_the_cost(rendered: Small, stem: str) -> None:
    page = rendered.page(f"book/chapters/demo/{stem}")
    files = {link["text"]: link["href"] for link in page.links if "download" in link}
    assert list(files) == [f"{stem}.ipynb", f"{stem}.md"]
    for name, href in files.items():
        copied = rendered.root / "_build/html/book/chapters/demo" / href
        assert copied.read_bytes() == (rendered.root / "book/chapters/demo" / name).read_bytes()
    assert "executed in 12.3 s, 410 MiB, Linux x, 2 CPUs; re-checked by nbval" in page.text
    assert f"make run CHAPTER=demo/{stem}" in page.text
    assert page.text.index("12.3 s") > page.text.index(f"Title of {stem}")


def test_injected_parameters_are_hidden_and_the_defaults_shown(rendered: Small) -> None:
    text = rendered.page("book/chapters/demo/experiments").text
    assert "n = 3" in text
    assert "secret" not in text


def test_environment_adds_up(rendered: Small) -> None:
    text = re.sub(r"\s+", " ", rendered.page("book/machine").text)
    assert "demo/experiments 12.3 410 Linux x, 2 CPUs 3.11.2" in text
    assert "all, one after another 24.6 410 at most" in text
    assert "numpy 2.4.6 demo/experiments, demo/theory" in text


def test_claims_json_is_written(rendered: Small) -> None:
    found = json.loads((rendered.root / "_build" / "claims.json").read_text("utf-8"))
    assert [(e["claim"], e["verdict"]) for e in found] == [
        ("demo/held", "verified"),
        ("demo/not-held", "refuted"),
        ("demo/later", "planned"),
        ("demo/no-data", "blocked"),
    ]


def test_other_builders_get_the_words(small: Small) -> None:
    warnings, _ = small.build("text")
    assert warnings == ""
    text = (small.root / "_build/text/book/ledger.txt").read_text("utf-8")
    for word in (
        "✔ verified",
        "✘ refuted",
        "accept ≥ 1; refute < 0.9",
        "half of it",
        "secret data",
    ):
        assert word in text, word


# --- what goes wrong ----------------------------------------------------------------------------


def _unknown_chapter(small: Small) -> None:
    small.write("book/intro.md", "# First\n\n```{claims} nowhere\n```\n")


def _one_notebook(small: Small) -> None:
    small.write("book/intro.md", "# First\n\n```{claims} demo/theory\n```\n")


def _broken_claims(small: Small) -> None:
    small.claims(CLAIMS | {"summary": ""})


def _no_stamp(small: Small) -> None:
    small.pair("theory", stamped=False)


def _not_rendered(small: Small) -> None:
    """The verdict's page is gone, its record is there."""
    path = small.root / "book/chapters/demo/theory.ipynb"
    notebook = json.loads(path.read_text("utf-8"))
    del notebook["cells"][-1]["outputs"][0]["data"]["text/html"]
    small.write("book/chapters/demo/theory.ipynb", json.dumps(notebook))


def _no_ledger(small: Small) -> None:
    (small.root / "book/ledger.md").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_unknown_chapter, ["intro.md", "no chapter or notebook 'nowhere'"]),
        (_one_notebook, ["intro.md", "'demo/theory' is no chapter"]),
        (_broken_claims, ["intro.md", "claims.yml", "summary"]),
        (_no_stamp, ["demo/theory has no stamp", "make run CHAPTER=demo/theory"]),
        (_not_rendered, ["target not found: claim-demo-held"]),
        (_no_ledger, ["target not found: ledger-demo-later"]),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_fault_is_a_warning_that_names_it(small: Small, spoil: Any, words: list[str]) -> None:
    spoil(small)
    warnings, _ = small.build()
    for word in words:
        assert word in warnings


def test_failed_build_is_not_taken_for_done(small: Small) -> None:
    _no_stamp(small)
    first, _ = small.build(keep_going=True)
    second, read = small.build(keep_going=True)
    assert "has no stamp" in first
    assert first == second
    assert read == 5


def test_pages_follow_pairs_and_claims(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    small.build()
    assert small.build()[1] == 0, "nothing changed, nothing is read again"
    monkeypatch.setitem(MEASURED, "theory", ("held", 0.95, {"halved": 0.5}))
    small.pair("theory")
    assert small.build() == ("", 4), "first page, ledger, environment and the notebook itself"
    assert small.page("book/intro").find("pr-cell")[0]["text"].startswith("? inconclusive")
    small.claims(CLAIMS | {"summary": "Another summary."})
    small.build()
    assert "Another summary." in small.page("book/ledger").text
    assert "Another summary." in small.page("book/chapters/demo/theory").text


def test_book_without_chapters_renders(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.write("_toc.yml", "format: jb-book\nroot: book/intro\n")
    small.write(
        "book/intro.md", "# First\n\n```{claims}\n:view: matrix\n```\n\n```{environment}\n```\n"
    )
    assert small.build()[0] == ""
    assert "0 papers; 0 claims." in small.page("book/intro").text


# --- mends of the theme -------------------------------------------------------------------------

HEAD = """<html><head>
  <script data-cfasync="false">
    document.documentElement.dataset.mode = localStorage.getItem("mode") || "auto";
    document.documentElement.dataset.theme = localStorage.getItem("theme") || "auto";
  </script>
<link rel="preload" as="font" type="font/woff2" crossorigin href="a/fa-solid-900.woff2" />
<link rel="preload" as="font" type="font/woff2" crossorigin href="a/fa-brands-400.woff2" />
  <link rel="preload" as="script" href="a/bootstrap.js" />
    <link rel="stylesheet" type="text/css" href="_static/sphinx-thebe.css?v=4fa983c6" />
    <script>const THEBE_JS_URL = "https://unpkg.com/thebe.js"; const selector = ".thebe"</script>
    <script async="async" src="_static/sphinx-thebe.js?v=c100c467"></script>
    <script>let toggleHintShow = 'Click to show';</script>
    <script>const THEBE_JS_URL = "https://unpkg.com/thebe.js"; const selector = ".thebe"</script>
  </head><body>
<div class="bd-sidebar-primary bd-sidebar">
<details><summary><span class="toctree-toggle" role="presentation"></span></summary></details></div>
<div role="list" class="citation-list">
<div class="citation" id="id2" role="doc-biblioentry">A book.</div></div>
    <script type="text/x-thebe-config">
    { requestKernel: true }
    </script>
    <script>kernelName = 'python3'</script>
</body></html>"""

FAULTS = {  # fault: (what shows it, what has to stand instead)
    "Thebe": ("hebe|THEBE|kernelName|unpkg", "let toggleHintShow"),
    "blocked font preloads": ('as="font"', 'as="script"'),
    "invalid theme mode": (r'theme"\) \|\| "auto"', r'theme"\) \|\| \(matchMedia'),
    "roles of the bibliography": ('role="list"|role="doc-', '<div class="citation-list">'),
    "toggles without a name": ("<summary><", '<summary aria-label="its pages"><span'),
    "sidebar without a role": (
        '<div class="bd-side',
        'aria-label="Book" class="bd-sidebar-primary',
    ),
}


def test_every_mend_has_its_case() -> None:
    assert {one.fault for one in sphinx_ext.MENDS} == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_mend(fault: str) -> None:
    shows, instead = FAULTS[fault]
    assert re.search(shows, HEAD)
    mended = sphinx_ext.mend(HEAD, "page.html")
    assert not re.search(shows, mended)
    assert re.search(instead, mended)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("const THEBE_JS_URL =", "const THEBE_JS_URL=", "Thebe"),
        ('rel="preload" as="font"', 'as="font" rel="preload"', "blocked font preloads"),
        ('|| "auto"', '|| ""', "invalid theme mode"),
        ('"theme")', '"colours")', "invalid theme mode"),
        ('<div role="list"', '<div  role="list"', "roles of the bibliography"),
        ('"toctree-toggle"', '"toc-toggle"', "toggles without a name"),
        ("bd-sidebar-primary", "bd-sidebar-first", "sidebar without a role"),
    ],
)
def test_theme_that_changed_is_loud(old: str, new: str, fault: str) -> None:
    changed = HEAD.replace(old, new)
    assert changed != HEAD
    with pytest.raises(ExtensionError, match=rf"page\.html.*{fault}.*theme changed"):
        sphinx_ext.mend(changed, "page.html")


def test_mended_page_stays_as_it_is() -> None:
    once = sphinx_ext.mend(HEAD, "page.html")
    assert sphinx_ext.mend(once, "page.html") == once


def test_page_without_notebook_or_bibliography_is_mended() -> None:
    plain = re.sub(r"<div role=\"list\".*</script>\n</body>", "</body>", HEAD, flags=re.DOTALL)
    assert "kernelName" not in plain
    assert "THEBE" not in sphinx_ext.mend(plain, "page.html")


# --- colours ------------------------------------------------------------------------------------


def _luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.2)."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_formula() -> None:
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


@pytest.mark.parametrize(("mode", "page"), [("light", "#ffffff"), ("dark", "#121212")])
def test_verdicts_are_legible(mode: str, page: str) -> None:
    css = Path(__file__).parents[2].joinpath("book/_static/proofread.css").read_text("utf-8")
    block = re.search(rf'html\[data-theme="{mode}"\] {{(.*?)}}', css, re.DOTALL)
    assert block
    colours = dict(re.findall(r"--pr-([a-z-]+):\s*(#[0-9a-f]{6})", block[1]))
    pairs = [(fg, fg.replace("-fg", "-bg")) for fg in colours if fg.endswith("-fg")]
    assert len(pairs) == len(VERDICTS)
    for fg, bg in pairs:
        assert _contrast(colours[fg], colours[bg]) >= 4.5, fg
        assert _contrast(colours[fg.replace("-fg", "-edge")], page) >= 3, f"border of {fg}"
    assert _contrast(colours["quiet"], page) >= 4.5
