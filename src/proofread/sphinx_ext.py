"""The book's Sphinx extension: ledger, environment, run lines, and mends of the stock theme.

Directives ``claims`` and ``environment`` read the executed pairs while a page is read, so no
generated page can go stale. Every chapter notebook gets a line under its title with its files and
its cost. Once the pages are written, faults of the stock theme are mended in them, and
``_build/claims.json`` is written. This module knows no chapter.
"""

from __future__ import annotations

import html
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

from .claims import VERDICTS, ClaimError
from .ledger import Chapter, Entry, chapters, write_json
from .notebooks import Notebook, NotebookError, books, find_root, read_pair, stamp_of

logger = logging.getLogger(__name__)

#: What each verdict means, as the legend says it.
MEANINGS = {
    "verified": "proved, or measured at the paper's scale",
    "holds at reduced scale": "measured at a size that runs here; the scale is stated",
    "refuted": "the value lies where the rule, fixed before, says no",
    "inconclusive": "the value lies in between, or a control did not flip",
    "blocked": "needs something that cannot be had here; it is named",
    "planned": "no result yet",
}


# --- small builders of docutils nodes -----------------------------------------------------------


class details(nodes.General, nodes.Element):  # docutils names its nodes in lower case
    """A part that a reader unfolds; builders other than HTML show it unfolded."""


def _open_details(translator: Any, node: details) -> None:
    summary = translator.encode(node["summary"])
    translator.body.append(f'<details class="pr-details"><summary>{summary}</summary>\n')


def _close_details(translator: Any, _: details) -> None:
    translator.body.append("</details>\n")


def _unfolded(_translator: Any, _node: details) -> None:
    """Emit nothing: the children are shown as they are."""


def _filled(parent: Any, *children: nodes.Node) -> Any:
    """The parent, with the children appended."""
    parent.extend(children)
    return parent


def _inline(text: str, *classes: str) -> nodes.inline:
    return nodes.inline(text, text, classes=list(classes))


def _paragraph(*parts: nodes.Node | str, classes: tuple[str, ...] = ()) -> nodes.paragraph:
    made = nodes.paragraph(classes=list(classes))
    made += [nodes.Text(part) if isinstance(part, str) else part for part in parts]
    return made


def _css(verdict: str) -> str:
    return f"pr-{verdict.replace(' ', '-')}"


def _table(head: list[str], rows: list[list[nodes.Node | str]], *classes: str) -> nodes.table:
    """A table with a head; each cell is text, an inline node, or a block."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=24) for _ in head]  # for text; a browser fits its own
    group += nodes.thead("", _row(list(head)))
    group += nodes.tbody("", *(_row(row) for row in rows))
    return nodes.table("", group, classes=["colwidths-auto", *classes])


def _row(cells: list[nodes.Node | str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", _block(cell)) for cell in cells))


def _block(cell: nodes.Node | str) -> nodes.Node:
    return _paragraph(cell) if isinstance(cell, str | nodes.Inline) else cell


def _fields(pairs: list[tuple[str, nodes.Node | str]]) -> nodes.field_list:
    """A list of named facts; those with nothing to say are left out."""
    made = nodes.field_list(classes=["pr-facts"])
    for name, body in pairs:
        if body:
            made += nodes.field(
                "", nodes.field_name(name, name), nodes.field_body("", _block(body))
            )
    return made


def _to_anchor(anchor: str, child: nodes.Node) -> addnodes.pending_xref:
    """A link to an anchor that some page of the book has to carry; nitpicky builds say if none."""
    made = addnodes.pending_xref(
        "", reftype="verdict", reftarget=anchor, refdomain="", refwarn=True
    )
    return _filled(made, child)


def _to_page(docname: str, text: str) -> addnodes.pending_xref:
    made = addnodes.pending_xref(
        "", reftype="doc", reftarget=f"/{docname}", refdomain="std", refexplicit=True, refwarn=True
    )
    return _filled(made, _inline(text))


# --- the claims directive -----------------------------------------------------------------------


def _tally(entries: list[Entry]) -> str:
    """How many claims there are, and how many of each verdict, counted."""
    counts = Counter(entry.verdict for entry in entries)
    parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    total = f"{len(entries)} claim{'s' if len(entries) != 1 else ''}"
    return f"{total}: {', '.join(parts)}" if parts else total


def _home(root: Path, slug: str) -> str:
    """The document a chapter starts with: ``theory``, or its first notebook."""
    stems = [notebook.stem for notebook in books(root, slug)]
    return f"book/chapters/{slug}/{'theory' if 'theory' in stems else stems[0]}"


def ledger_anchor(entry: Entry) -> str:
    """The id of a claim's entry in the full ledger."""
    return entry.anchor.replace("claim-", "ledger-", 1)


def _ruled_at(entry: Entry) -> str:
    """Where a verdict leads: the cell that ruled, or the ledger while none has."""
    return entry.anchor if entry.record else ledger_anchor(entry)


class ClaimsDirective(SphinxDirective):
    """``{claims}``: the full ledger, one chapter's box (its slug), or ``:view: matrix``."""

    optional_arguments = 1
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {
        "view": lambda text: directives.choice(text, ("full", "matrix"))
    }

    def run(self) -> list[nodes.Node]:
        slug = self.arguments[0] if self.arguments else None
        try:
            if slug and "/" in slug:
                raise NotebookError(f"{slug!r} is no chapter: give its name alone")
            root = find_root(Path(self.env.srcdir))
            _depend(self.env, root, books(root, slug))
            found = chapters(root, slug)
        except (NotebookError, ClaimError) as error:
            where = self.get_location()
            logger.warning("claims: %s", error, location=where, type="proofread", subtype="claims")
            return []
        if self.options.get("view") == "matrix":
            return self.matrix(root, found)
        if slug:
            return [self.box(chapter) for chapter in found]
        return self.full(root, found)

    def matrix(self, root: Path, found: list[Chapter]) -> list[nodes.Node]:
        """A row per paper, a linked cell per claim, what they add up to, and the legend."""
        rows: list[list[nodes.Node | str]] = []
        for chapter in found:
            cells = nodes.bullet_list(classes=["pr-cells"])
            cells += [nodes.list_item("", _paragraph(self.cell(e))) for e in chapter.entries]
            rows.append([_to_page(_home(root, chapter.slug), chapter.file.paper.title), cells])
        entries = [entry for chapter in found for entry in chapter.entries]
        papers = f"{len(found)} paper{'s' if len(found) != 1 else ''}"
        total = _paragraph(f"{papers}; {_tally(entries)}.", classes=("pr-total",))
        return [_table(["paper", "claims"], rows, "pr-matrix"), total, self.legend()]

    def cell(self, entry: Entry) -> nodes.Node:
        """A square with the verdict's symbol; its words are there for those who do not see it."""
        square = _inline("", "pr-cell", _css(entry.verdict))
        square += _inline(VERDICTS[entry.verdict], "pr-symbol")
        square += _inline(f" {entry.verdict}: {entry.claim.says}", "pr-words")
        link = _to_anchor(_ruled_at(entry), square)
        link["reftitle"] = f"{entry.verdict}: {entry.claim.says}"
        return link

    def legend(self) -> nodes.Node:
        made = nodes.bullet_list(classes=["pr-legend"])
        for verdict, symbol in VERDICTS.items():
            mark = _inline("", "pr-cell", _css(verdict))
            mark += _inline(symbol, "pr-symbol")
            text = _paragraph(mark, nodes.strong("", verdict))
            text += _inline(MEANINGS[verdict], "pr-meaning")
            made += nodes.list_item("", text)
        return made

    def full(self, root: Path, found: list[Chapter]) -> list[nodes.Node]:
        """A section per paper with every claim, each a target of the matrix."""
        made = []
        for chapter in found:
            title = chapter.file.paper.title
            section = nodes.section(ids=[nodes.make_id(f"paper-{chapter.slug}")], names=[])
            section += nodes.title("", "", _to_page(_home(root, chapter.slug), title))
            section += self.paper(chapter)
            section += [self.entry(chapter, e, ledger_anchor(e)) for e in chapter.entries]
            made.append(section)
        return made

    def box(self, chapter: Chapter) -> nodes.Node:
        """What stands at the head of a chapter."""
        made = nodes.container(classes=["pr-box"])
        title = nodes.strong("", chapter.file.paper.title)
        made += _paragraph(title, classes=("pr-paper-title",))
        made += self.paper(chapter)
        return _filled(made, *(self.entry(chapter, entry) for entry in chapter.entries))

    def paper(self, chapter: Chapter) -> list[nodes.Node]:
        """Authors, venue, our summary, and the count of verdicts."""
        paper = chapter.file.paper
        facts = [", ".join(paper.authors), paper.venue]
        facts += [f"arXiv {paper.arxiv}"] if paper.arxiv else []
        source = _paragraph(" · ".join(facts), classes=("pr-paper",))
        if paper.cite:
            source += [nodes.Text(" · "), *self.parsed(f"{{cite}}`{paper.cite}`")]
        total = _paragraph(f"{_tally(chapter.entries)}.", classes=("pr-total",))
        return [source, _paragraph(chapter.file.summary), total]

    def entry(self, chapter: Chapter, entry: Entry, anchor: str | None = None) -> nodes.Node:
        """One claim: verdict and our sentence; then the paper's words, the value, and the rule.

        In a chapter's box, which has no anchors, all but the first line is folded.
        """
        claim = entry.claim
        made = nodes.container(classes=["pr-claim", _css(entry.verdict)])
        if anchor:
            made["ids"].append(anchor)
            std = self.env.get_domain("std")
            std.anonlabels[anchor] = (self.env.docname, anchor)  # type: ignore[attr-defined]
        badge: nodes.Node = _inline(f"{VERDICTS[entry.verdict]} {entry.verdict}", "pr-badge")
        badge = _to_anchor(entry.anchor, badge) if entry.record else badge
        made += _paragraph(badge, " ", nodes.strong("", claim.says), classes=("pr-says",))
        quote = _paragraph("“", *self.parsed(claim.quote), "”", classes=("pr-quote",))
        words = _filled(quote, nodes.Text(" "), _inline(f"— {claim.source}", "pr-source"))
        facts, rules = _fields(_headline(entry)), _fields(_how_ruled(chapter, entry))
        if anchor:
            folded = [details("", rules, summary="how it is ruled")] if len(rules) else []
            return _filled(made, words, facts, *folded)
        summary = "the paper’s words"
        if len(rules):  # a docutils node is true even when it is empty
            summary += ", the rule" + (" and the value" if entry.record else "")
        return _filled(made, details("", words, facts, rules, summary=summary))

    def parsed(self, text: str) -> list[nodes.Node]:
        """Inline markup (emphasis, math) as the page's own parser reads it."""
        found, messages = self.state.inline_text(text, self.lineno)
        return [*found, *messages]


def _headline(entry: Entry) -> list[tuple[str, nodes.Node | str]]:
    """The facts in sight: what was measured, or what is missing."""
    claim = entry.claim
    if claim.needs:
        return [("needs", claim.needs)]
    if not entry.record:
        state = "rules fixed, no result yet" if claim.ruled_in else "no rules yet"
        return [("state", state)]
    facts: list[tuple[str, nodes.Node | str]] = [
        ("measured", entry.measured()),
        ("rule", f"accept {claim.accept}; refute {claim.refute}"),
    ]
    if entry.verdict != "verified":
        facts.append(("why", entry.record["reason"]))
    if claim.amended:
        facts.append(("amended", claim.amended))
    return facts


def _how_ruled(chapter: Chapter, entry: Entry) -> list[tuple[str, nodes.Node | str]]:
    """The facts behind the verdict: measure, rule, controls, scale, the rules' commit."""
    claim, scale = entry.claim, entry.claim.scale
    if not (claim.measure or claim.control or scale):
        return []
    facts: list[tuple[str, nodes.Node | str]] = [
        ("kind", claim.kind),
        ("measure", claim.measure or ""),
        ("unit", claim.unit or ""),
    ]
    if claim.accept and not entry.record:
        facts.append(("rule", f"accept {claim.accept}; refute {claim.refute}"))
    for name, control in claim.control.items():
        facts.append((f"control: {name}", _control(entry, name, control)))
    if scale:
        facts += [("paper's scale", scale.paper), ("scale here", scale.book)]
        facts.append(("stand-in", scale.stand_in or ""))
    if entry.record:
        commit = chapter.commits.get(entry.notebook or "", "")
        cell = _to_anchor(entry.anchor, _inline(f"the cell in {entry.notebook}"))
        facts += [("ruled by", cell), ("rules' commit", commit[:10])]
    return facts


def _control(entry: Entry, name: str, control: Any) -> str:
    expected = f"expected {control.expect} — {control.change}"
    if not entry.record:
        return expected
    span = entry.record["control"][name]
    ends = "" if span["low"] == span["high"] else f" [{span['low']:g}, {span['high']:g}]"
    return f"{span['value']:g}{ends}, {expected}"


def _depend(env: BuildEnvironment, root: Path, notebooks: list[Notebook]) -> None:
    """Let the page be read again when a claims file, a pair or the contents changes."""
    env.note_dependency(str(root / "_toc.yml"))
    for notebook in notebooks:
        env.note_dependency(str(notebook.claims))
        env.note_dependency(str(notebook.pair))


# --- the environment directive ------------------------------------------------------------------


class EnvironmentDirective(SphinxDirective):
    """``{environment}``: what each notebook cost, on what, and with which versions."""

    def run(self) -> list[nodes.Node]:
        try:
            root = find_root(Path(self.env.srcdir))
            notebooks = books(root)
            _depend(self.env, root, notebooks)
            stamps = {nb: stamp_of(read_pair(nb.pair)) for nb in notebooks}
        except NotebookError as error:
            where = self.get_location()
            logger.warning(
                "environment: %s", error, location=where, type="proofread", subtype="environment"
            )
            return []
        return [_runs(stamps), _pins(stamps)]


def _docname(notebook: Notebook) -> str:
    return f"book/chapters/{notebook.name}"


def _runs(stamps: Mapping[Notebook, dict[str, Any]]) -> nodes.table:
    rows: list[list[nodes.Node | str]] = []
    for notebook, stamp in stamps.items():
        run = stamp.get("run", {})
        facts = [str(run.get(key, "–")) for key in ("seconds", "peak_mb", "machine", "python")]
        rows.append([_to_page(_docname(notebook), notebook.name), *facts])
    total = sum(stamp.get("run", {}).get("seconds", 0) for stamp in stamps.values())
    peak = max((stamp.get("run", {}).get("peak_mb", 0) for stamp in stamps.values()), default=0)
    rows.append(["all, one after another", f"{total:.1f}", f"{peak} at most", "", ""])
    head = ["notebook", "seconds", "peak MiB", "machine", "Python"]
    return _table(head, rows, "pr-runs")


def _pins(stamps: Mapping[Notebook, dict[str, Any]]) -> nodes.table:
    """Each pinned package that some notebook imports, with the notebooks that do."""
    users: dict[tuple[str, str], list[str]] = {}
    for notebook, stamp in stamps.items():
        for pin in stamp.get("fingerprint", {}).get("pins", {}).items():
            users.setdefault(pin, []).append(notebook.name)
    rows: list[list[nodes.Node | str]] = [
        [package, version, _some(names)] for (package, version), names in sorted(users.items())
    ]
    return _table(["package", "version", "used by"], rows, "pr-pins")


def _some(names: list[str]) -> str:
    """A few names in full, many as a number."""
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} notebooks"


# --- every chapter notebook ---------------------------------------------------------------------


def notebook_of(env: BuildEnvironment, docname: str) -> Notebook | None:
    """The notebook that a document shows, if it is a chapter's."""
    parts = docname.split("/")
    if parts[:2] != ["book", "chapters"] or len(parts) != 4:
        return None
    return Notebook(find_root(Path(env.srcdir)), parts[2], parts[3])


def run_line(notebook: Notebook, stamp: Mapping[str, Any]) -> nodes.container:
    """The line under the title: files to download, what the run cost, how to repeat it."""
    run = stamp["run"]
    cost = f"executed in {run['seconds']} s, {run['peak_mb']} MiB, {run['machine']}; "
    made = nodes.container(classes=["pr-run"])
    files = [_download(notebook.pair), nodes.Text(" · "), _download(notebook.source)]
    made += _paragraph("download ", *files)
    made += _paragraph(cost, "re-checked by nbval")
    command = f"make run CHAPTER={notebook.name} FORCE=1"
    made += _paragraph("re-run: ", nodes.literal(command, command))
    return made


def _download(path: Path) -> addnodes.download_reference:
    made = addnodes.download_reference("", "", reftarget=f"/{_below_root(path)}")
    return _filled(made, nodes.literal(path.name, path.name))


def _below_root(path: Path) -> str:
    return "/".join(path.parts[-4:])  # book/chapters/<slug>/<file>


def on_doctree_read(app: Sphinx, doctree: nodes.document) -> None:
    """Add the run line, hide injected parameters, and register the anchors of rulings."""
    env = app.env
    notebook = notebook_of(env, env.docname)
    if notebook is None:
        return
    for cell in list(doctree.findall(nodes.container)):
        if "tag_injected-parameters" in cell["classes"]:
            cell.parent.remove(cell)
    for raw in doctree.findall(nodes.raw):
        for anchor in re.findall(r'<div class="pr-ruling[^>]* id="([^"]+)"', raw.astext()):
            std = env.get_domain("std")
            std.anonlabels[anchor] = (env.docname, anchor)  # type: ignore[attr-defined]
    stamp = stamp_of(read_pair(notebook.pair)) if notebook.pair.is_file() else {}
    if "run" not in stamp:
        logger.warning(
            "%s has no stamp: `make run CHAPTER=%s`",
            notebook.name,
            notebook.name,
            location=env.docname,
            type="proofread",
            subtype="stamp",
        )
        return
    section = next(doctree.findall(nodes.section))
    section.insert(1, run_line(notebook, stamp))


def on_missing_reference(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, child: nodes.Element
) -> nodes.Node | None:
    """Link verdicts to their anchors; leave outside types in signatures without a link.

    Without a network there is no inventory of other projects. A type in a signature cannot be
    misspelt (Python resolved it), so it needs none; what a docstring refers to has to exist.
    """
    target = node["reftarget"]
    if node["reftype"] == "verdict":
        page, anchor = env.get_domain("std").anonlabels.get(target, ("", ""))  # type: ignore[attr-defined]
        title = node.get("reftitle")
        here = node["refdoc"]
        return make_refnode(app.builder, here, page, anchor, child, title) if page else None
    return child if node.get("refdomain") == "py" and _in_signature(node) else None


def _in_signature(node: nodes.Node | None) -> bool:
    while node is not None and not isinstance(node, addnodes.desc_signature):
        node = node.parent
    return node is not None


# --- the generated reference --------------------------------------------------------------------


def on_signature(
    _app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, _text: str, _returns: str
) -> tuple[str, None] | None:
    """A pydantic model's constructor lists its fields, without pydantic's own annotations."""
    if not hasattr(thing, "model_fields"):
        return None
    shown = [key if f.is_required() else f"{key}=…" for key, f in thing.model_fields.items()]
    return f"(*, {', '.join(shown)})", None


def on_docstring(
    _app: Sphinx, what: str, _name: str, _thing: Any, _options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading the first words of a variable's comment as its type."""
    if what in ("data", "attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment


# --- mends of the stock theme -------------------------------------------------------------------


@dataclass(frozen=True)
class Mend:
    """A rewrite of built pages. ``trace`` finds the fault; after the rewrite it finds nothing."""

    fault: str
    trace: str
    pattern: str
    replacement: str
    everywhere: bool = True

    def apply(self, page: str, name: str) -> str:
        """The mended page.

        Raises:
            ExtensionError: the text to mend is gone, or the fault is still there afterwards.
        """
        mended, count = re.subn(self.pattern, self.replacement, page, flags=re.DOTALL)
        if (self.everywhere and not count) or re.search(self.trace, mended):
            state = "is still there" if count else "is written otherwise now, or gone"
            raise ExtensionError(
                f"{name}: {self.fault!r} {state}: the theme changed; look at the page, then "
                "adapt or drop this mend in sphinx_ext.py"
            )
        return mended


MENDS = (
    # Thebe would run cells on an outside server. Nothing here starts it; its settings name an
    # outside address, and they are written twice, which is an error in the console.
    Mend(
        "Thebe",
        trace=r"<script[^>]*>\s*(const THEBE_JS_URL|kernelName)|x-thebe-config|/sphinx-thebe\.",
        pattern=r"\s*(<script>(const THEBE_JS_URL|kernelName) = [^<]*</script>"
        r'|<script type="text/x-thebe-config">.*?</script>'
        r'|<script [^>]*src="[^"]*/sphinx-thebe\.js[^"]*"></script>'
        r'|<link [^>]*href="[^"]*/sphinx-thebe\.css[^"]*" />)',
        replacement="",
    ),
    # Browsers refuse to preload fonts from file://; the style sheet loads them anyway.
    Mend(
        "blocked font preloads",
        trace=r'<link[^>]* as="font"',
        pattern=r'\s*<link rel="preload" as="font"[^>]*/>',
        replacement="",
    ),
    # "auto" is no colour scheme that the style sheet knows: ask for the reader's, without a flash.
    Mend(
        "invalid theme mode",
        trace=r'dataset\.theme = localStorage\.getItem\("theme"\) \|\| "',
        pattern=r'(dataset\.theme = localStorage\.getItem\("theme"\)) \|\| "auto"',
        replacement=r'\1 || (matchMedia("(prefers-color-scheme: dark)").matches'
        ' ? "dark" : "light")',
    ),
    # Accessibility: roles without their required children, controls without a name.
    Mend(
        "roles of the bibliography",
        trace=r'role="doc-biblioentry"|role="list"[^>]*class="citation-list"',
        pattern=r' role="doc-biblioentry"|(?<=<div) role="list"(?= class="citation-list")',
        replacement="",
        everywhere=False,
    ),
    Mend(
        "toggles without a name",
        trace=r"<summary>\s*<",
        pattern=r'<summary>(?=<span class="toctree-toggle")',
        replacement='<summary aria-label="its pages">',
        everywhere=False,
    ),
    Mend(
        "sidebar without a role",
        trace=r'<div class="bd-sidebar-primary',
        pattern='<div (?=class="bd-sidebar-primary)',
        replacement='<div role="region" aria-label="Book" ',
    ),
)
MARK = "<!-- mended by proofread -->"
REDIRECT = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<title>{title}</title>
<meta http-equiv="refresh" content="0; url={first}" />
</head>
<body><p><a href="{first}">{title}</a></p></body>
</html>
"""


def mend(page: str, name: str) -> str:
    """A built page with every fault mended; one that is mended already stays as it is."""
    if MARK in page:
        return page
    for one in MENDS:
        page = one.apply(page, name)
    return page.replace("</head>", f"{MARK}\n  </head>", 1)


def pages(out: Path) -> Iterator[Path]:
    """The built pages; the theme's own templates and the redirect are none."""
    for path in sorted(out.rglob("*.html")):
        inside = path.relative_to(out).as_posix()
        if not inside.startswith("_") and inside != "index.html":
            yield path


def mend_pages(app: Sphinx) -> None:
    """Mend what was written, drop pages whose source is gone, and write a whole ``index.html``."""
    out = Path(app.outdir)
    indices = [entry[0] for entry in getattr(app.builder, "domain_indices", [])]
    names = {*app.env.found_docs, "index", "genindex", "search", *indices}
    for path in pages(out):
        if path.relative_to(out).with_suffix("").as_posix() not in names:
            path.unlink()
            continue
        text = path.read_text("utf-8")
        if (mended := mend(text, path.name)) != text:
            path.write_text(mended, "utf-8")
    if app.config.root_doc != "index":
        title, first = html.escape(app.config.html_title), f"{app.config.root_doc}.html"
        (out / "index.html").write_text(REDIRECT.format(title=title, first=first), "utf-8")


def on_build_finished(app: Sphinx, exception: Exception | None) -> None:
    """Mend the pages, write the ledger, and forget a build that had warnings."""
    if exception is not None or app.builder.name != "html":
        return
    if app.config.html_theme == "sphinx_book_theme":
        mend_pages(app)
    try:
        write_json(find_root(Path(app.srcdir)))
    except (NotebookError, ClaimError) as error:
        logger.warning("claims.json: %s", error, type="proofread", subtype="claims")
    if app.keep_going and app._warncount:
        # Sphinx would not repeat the warnings of pages that it need not write again: a second
        # build would pass. Without its pickled environment it starts afresh.
        (Path(app.doctreedir) / "environment.pickle").unlink(missing_ok=True)


# --- set-up -------------------------------------------------------------------------------------


def _version() -> int:
    """A number that changes with the machinery, so that every page is read again."""
    here = Path(__file__).parent
    names = ("claims.py", "ledger.py", "notebooks.py", "sphinx_ext.py")
    return zlib.crc32(b"".join((here / name).read_bytes() for name in names))


def on_config_inited(_: Sphinx, config: Any) -> None:
    """A ruling's record is for programs: its unknown MIME type is no fault of the page."""
    config.suppress_warnings = [*config.suppress_warnings, "mystnb.unknown_mime_type"]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension with Sphinx."""
    unfolded = (_unfolded, _unfolded)
    app.add_node(
        details,
        html=(_open_details, _close_details),
        latex=unfolded,
        text=unfolded,
        man=unfolded,
        texinfo=unfolded,
    )
    app.add_directive("claims", ClaimsDirective)
    app.add_directive("environment", EnvironmentDirective)
    app.connect("config-inited", on_config_inited)
    app.connect("doctree-read", on_doctree_read, priority=400)  # before downloads are collected
    app.connect("missing-reference", on_missing_reference)
    if "sphinx.ext.autodoc" in app.extensions:
        app.connect("autodoc-process-signature", on_signature)
        app.connect("autodoc-process-docstring", on_docstring, priority=400)  # before napoleon
    app.connect("build-finished", on_build_finished, priority=900)
    return {"env_version": _version(), "parallel_read_safe": True, "parallel_write_safe": True}
