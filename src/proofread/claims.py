"""Claims, the rules fixed before their results, and the verdicts a program computes from them.

A chapter's ``claims.yml`` holds what the paper claims and how we rule. A notebook measures and
calls :func:`rule`, which compares the value and its controls with the committed intervals. Nobody
types a verdict.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .checkout import find_in_checkout

MIME = "application/vnd.proofread.ruling+json"
KINDS = Literal["theorem", "identity", "rate", "comparison", "magnitude", "mechanism"]

#: Every verdict, in the order of the legend, with its symbol (colour is never the only mark).
VERDICTS = {
    "verified": "✔",
    "holds at reduced scale": "◐",
    "refuted": "✘",
    "inconclusive": "?",
    "blocked": "⊘",
    "planned": "·",
}


class ClaimError(Exception):
    """A claim, its rules or its measured value is not usable; the message names the remedy."""


@dataclass(frozen=True)
class Interval:
    """A set of reals between two ends, each open or closed."""

    low: float
    high: float
    closed_low: bool = True
    closed_high: bool = True

    _BRACKETS = re.compile(r"^([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])$")
    _COMPARISON = re.compile(r"^(<=|>=|==|<|>)\s*(\S+)$")

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Read ``"[0, 1)"``, ``">= 1"``, ``"< 0.5"`` or ``"== 0"`` (``inf`` is allowed).

        Raises:
            ValueError: the text is none of these, or the interval is empty.
        """
        text = str(text).strip()
        if match := cls._BRACKETS.match(text):
            left, low, high, right = match.groups()
            ends = float(low), float(high)
            # An infinite end counts as inside: an unbounded interval is within "≥ 1" as well.
            closed = left == "[" or math.isinf(ends[0]), right == "]" or math.isinf(ends[1])
            made = cls(*ends, *closed)
        elif match := cls._COMPARISON.match(text):
            sign, number = match[1], float(match[2])
            made = {
                "<": cls(-math.inf, number, True, False),
                "<=": cls(-math.inf, number, True, True),
                ">": cls(number, math.inf, False, True),
                ">=": cls(number, math.inf, True, True),
                "==": cls(number, number),
            }[sign]
        else:
            raise ValueError(f"{text!r} is no interval: write '[a, b)', '>= a', '< b' or '== a'")
        if made.empty:
            raise ValueError(f"{text!r} holds no number: check the order and the ends")
        return made

    @property
    def empty(self) -> bool:
        closed = self.closed_low and self.closed_high
        return not (self.low < self.high or (self.low == self.high and closed))

    def __contains__(self, x: float) -> bool:
        above = x >= self.low if self.closed_low else x > self.low
        below = x <= self.high if self.closed_high else x < self.high
        return above and below

    def holds(self, span: Span) -> bool:
        """Whether the whole span lies inside."""
        return span.low in self and span.high in self

    def meets(self, other: Interval) -> bool:
        """Whether the two share a point."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        both = (low in self and low in other) if low == high else True
        return low < high or (low == high and both)

    def within(self, other: Interval) -> bool:
        """Whether every point of this interval lies in ``other``."""
        low = self.low > other.low or (
            self.low == other.low and self.closed_low <= other.closed_low
        )
        high = self.high < other.high or (
            self.high == other.high and self.closed_high <= other.closed_high
        )
        return low and high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {self.low:g}"
        if math.isinf(self.low):
            return f"{'≤' if self.closed_high else '<'} {self.high:g}"
        if math.isinf(self.high):
            return f"{'≥' if self.closed_low else '>'} {self.low:g}"
        left, right = "[" if self.closed_low else "(", "]" if self.closed_high else ")"
        return f"{left}{self.low:g}, {self.high:g}{right}"


@dataclass(frozen=True)
class Span:
    """A measured value with the ends of its interval (equal to it when it is exact)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, measured: Any, name: str = "value") -> Span:
        """Take a number, an estimate (``value``, ``low``, ``high``) or an Arb ball.

        Raises:
            ClaimError: it is none of these, it is NaN or infinite, or not within its interval.
        """
        if isinstance(measured, str | bool):
            raise ClaimError(f"{name}={measured!r} is no measurement: pass the number measured")
        if all(hasattr(measured, end) for end in ("value", "low", "high")):
            parts = measured.value, measured.low, measured.high
        elif hasattr(measured, "mid") and hasattr(measured, "rad"):
            parts = measured.mid(), measured.lower(), measured.upper()
        else:
            parts = (measured,) * 3
        try:
            span = cls(*(float(part) for part in parts))
        except (TypeError, ValueError) as error:
            raise ClaimError(
                f"{name}={measured!r} is no number, estimate or ball: pass what was measured"
            ) from error
        if any(math.isnan(part) for part in (span.value, span.low, span.high)):
            raise ClaimError(f"{name} is NaN: a claim cannot be ruled on it; find where it arose")
        if math.isinf(span.value):
            raise ClaimError(f"{name} is infinite: find where it diverged")
        if not span.low <= span.value <= span.high:
            raise ClaimError(f"{name}={span.value} lies outside its interval")
        return span

    def rounded(self, digits: int) -> dict[str, float | str]:
        """The three numbers at ``digits`` significant digits, as they are recorded.

        JSON knows no infinity: an unbounded end is recorded as ``"inf"`` or ``"-inf"``.
        """
        ends = {"value": self.value, "low": self.low, "high": self.high}
        plain = {key: float(f"{number:.{digits}g}") for key, number in ends.items()}
        return {key: str(x) if math.isinf(x) else x for key, x in plain.items()}

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Span:
        """A span back from what ``rounded`` gave."""
        return cls(*(float(record[key]) for key in ("value", "low", "high")))

    def show(self, digits: int) -> str:
        shown, low, high = (f"{x:.{digits}g}" for x in (self.value, self.low, self.high))
        return shown if low == high else f"{shown} [{low}, {high}]"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Control(_Model):
    """A change to the measurement after which the verdict must be the opposite."""

    change: str = Field(min_length=1)
    expect: Interval

    @field_validator("expect", mode="before")
    @classmethod
    def _parse(cls, text: Any) -> Interval:
        return text if isinstance(text, Interval) else Interval.parse(text)


class Scale(_Model):
    """The paper's setting, the book's, and what stands in for what."""

    paper: str = Field(min_length=1)
    book: str = Field(min_length=1)
    reduced: bool
    stand_in: str | None = None


class Claim(_Model):
    """One claim of the paper with the rules fixed before its result."""

    id: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    quote: str = Field(min_length=1)
    source: str = Field(min_length=1)
    says: str = Field(min_length=1)
    kind: KINDS
    measure: str | None = None
    unit: str | None = None
    accept: Interval | None = None
    refute: Interval | None = None
    control: dict[str, Control] = Field(default_factory=dict)
    scale: Scale | None = None
    ruled_in: str | None = None
    digits: int = Field(default=3, ge=1, le=15)
    paper_value: float | None = None
    needs: str | None = None
    amended: str | None = Field(default=None, min_length=20)
    # what the verdict is about, where the construction is ours because the paper's is unknown
    construction: str | None = Field(default=None, min_length=10)

    @field_validator("accept", "refute", mode="before")
    @classmethod
    def _parse(cls, text: Any) -> Interval | None:
        return text if text is None or isinstance(text, Interval) else Interval.parse(text)

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        if self.needs or self.ruled_in is None:
            return self
        missing = [
            name
            for name in ("measure", "unit", "accept", "refute", "control", "scale")
            if not getattr(self, name)
        ]
        if missing:
            raise ValueError(f"it is to be ruled, so it needs {', '.join(missing)}")
        assert self.accept
        assert self.refute
        if self.accept.meets(self.refute):
            raise ValueError(f"accept ({self.accept}) and refute ({self.refute}) overlap")
        sides = (self.accept, self.refute)
        if not any(c.expect.within(side) for c in self.control.values() for side in sides):
            raise ValueError("no control is expected to lie in accept or in refute: none can flip")
        return self

    def side(self, span: Span) -> Literal["accept", "refute", "between"]:
        """Where a value falls; its whole interval has to lie there."""
        assert self.accept
        assert self.refute
        if self.accept.holds(span):
            return "accept"
        return "refute" if self.refute.holds(span) else "between"

    @property
    def rules_digest(self) -> str:
        """A digest of the rules alone, recorded with each result."""
        rules = {
            "measure": self.measure,
            "unit": self.unit,
            "accept": repr(self.accept),
            "refute": repr(self.refute),
            "control": {k: [c.change, repr(c.expect)] for k, c in sorted(self.control.items())},
            "scale": self.scale.model_dump() if self.scale else None,
        }
        return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]


class Paper(_Model):
    """What is proof-read."""

    title: str
    authors: list[str]
    venue: str
    arxiv: str | None = None
    cite: str | None = None


class ClaimsFile(_Model):
    """The content of a chapter's ``claims.yml``."""

    paper: Paper
    summary: str = Field(min_length=1)
    claims: list[Claim] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> ClaimsFile:
        ids = [claim.id for claim in self.claims]
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"claim ids stand twice: {', '.join(twice)}")
        return self

    def __getitem__(self, claim_id: str) -> Claim:
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        known = ", ".join(claim.id for claim in self.claims)
        raise ClaimError(f"unknown claim {claim_id!r}: claims.yml has {known}")


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice: of two rules, the second would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"{', '.join(map(str, twice))} twice{node.start_mark}")
        return super().construct_mapping(node, deep=deep)


def parse_claims(text: str) -> ClaimsFile:
    """Read and check the text of a ``claims.yml``.

    Raises:
        ClaimError: it is no YAML, has a key twice, or breaks the schema; each fault is named.
    """
    try:
        return ClaimsFile.model_validate(yaml.load(text, Loader=_UniqueKeys))  # a SafeLoader
    except yaml.YAMLError as error:
        raise ClaimError(f"not readable as YAML: {error}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ClaimError("; ".join(lines)) from error


@functools.lru_cache(maxsize=256)
def _load(path: Path, _version: tuple[int, int]) -> ClaimsFile:
    try:
        return parse_claims(path.read_text("utf-8"))
    except (ClaimError, UnicodeDecodeError) as error:
        raise ClaimError(f"{path}: {error}") from error


def load_claims(path: Path) -> ClaimsFile:
    """Read and check a ``claims.yml``.

    Raises:
        ClaimError: the file is missing, is no YAML, or breaks the schema; each fault is named.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ClaimError(f"{path} cannot be read: {error.strerror}") from error
    return _load(path, (stat.st_mtime_ns, stat.st_size))


def find_claims(slug: str) -> Path:
    """The ``claims.yml`` of a chapter, from its own folder, a checkout above, or this package's.

    Raises:
        ClaimError: none of the places looked at has it; the message lists them.
    """
    own = Path.cwd() / "claims.yml"
    if own.parent.name == slug and own.is_file():
        return own
    try:
        return find_in_checkout(f"book/chapters/{slug}/claims.yml")
    except FileNotFoundError as error:
        raise ClaimError(f"no claims.yml of chapter {slug!r}: {error}") from error


@dataclass(frozen=True)
class Ruling:
    """A verdict with the rule, the value and the controls that led to it."""

    slug: str
    claim: Claim
    span: Span
    controls: dict[str, Span]
    verdict: str
    reason: str

    @property
    def anchor(self) -> str:
        return f"claim-{self.slug.replace('_', '-')}-{self.claim.id}"

    def record(self) -> dict[str, Any]:
        """The machine-readable result that is stored in the notebook."""
        digits = self.claim.digits
        return {
            "claim": f"{self.slug}/{self.claim.id}",
            "rules": self.claim.rules_digest,
            **self.span.rounded(digits),
            "unit": self.claim.unit,
            "control": {name: span.rounded(digits) for name, span in self.controls.items()},
            "verdict": self.verdict,
            "reason": self.reason,
        }

    def __repr__(self) -> str:
        claim, digits = self.claim, self.claim.digits
        lines = [
            f"{VERDICTS[self.verdict]} {self.slug}/{claim.id}: {self.verdict} ({self.reason})",
            f"  measured: {self.span.show(digits)} ({claim.unit})",
            f"  accept: {claim.accept}   refute: {claim.refute}",
        ]
        for name, span in self.controls.items():
            expect = claim.control[name].expect
            lines.append(f"  control {name}: {span.show(digits)} (expected {expect})")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str]]:
        claim, digits = self.claim, self.claim.digits
        rows = [
            ("measured", f"{self.span.show(digits)} ({claim.unit}) — {claim.measure}"),
            ("rule", f"accept {claim.accept}; refute {claim.refute}"),
        ]
        for name, span in self.controls.items():
            control = claim.control[name]
            rows.append(
                (
                    f"control: {name}",
                    f"{span.show(digits)}, expected {control.expect} — {control.change}",
                )
            )
        if claim.scale and claim.scale.stand_in:
            rows.append(("stand-in", claim.scale.stand_in))
        if claim.amended:
            rows.append(("amended", claim.amended))
        return rows

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(text)}</td></tr>'
            for key, text in self._rows()
        )
        css = self.verdict.replace(" ", "-")
        return (
            f'<div class="pr-ruling pr-{css}" id="{self.anchor}">'
            f'<p class="pr-verdict"><span aria-hidden="true">{VERDICTS[self.verdict]}</span> '
            f"<strong>{html.escape(self.verdict)}</strong> · {html.escape(self.claim.says)}</p>"
            f'<p class="pr-reason">{html.escape(self.reason)}</p>'
            f"<table>{rows}</table></div>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {MIME: self.record(), "text/html": self._repr_html_(), "text/plain": repr(self)}


def _doubt(claim: Claim, side: str, controls: Mapping[str, Span]) -> str | None:
    """Why the value cannot decide the claim, if it cannot."""
    strayed = [name for name, c in controls.items() if not claim.control[name].expect.holds(c)]
    if strayed:
        return f"control outside its expected interval: {', '.join(strayed)}"
    if side == "between":
        return "the value or its interval lies between accept and refute"
    opposite = {"accept": "refute", "refute": "accept"}[side]
    if not any(claim.side(c) == opposite for c in controls.values()):
        return "no control flipped the verdict: this measure cannot tell"
    return None


def judge(claim: Claim, span: Span, controls: Mapping[str, Span]) -> tuple[str, str]:
    """The verdict and its reason, from the committed rules alone."""
    side = claim.side(span)
    if doubt := _doubt(claim, side, controls):
        return "inconclusive", doubt
    assert claim.scale
    of = f"; {claim.construction}" if claim.construction else ""
    if side == "refute":
        scale = "at reduced scale" if claim.scale.reduced else "at the paper's scale"
        return "refuted", scale + of
    if claim.scale.reduced:
        return "holds at reduced scale", claim.scale.book + of
    return "verified", "proved or checked at the paper's scale" + of


def rejudge(claim: Claim, record: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict and reason that follow from a record's numbers, whatever the record says.

    A record may be more cautious than its rounded numbers (``rule`` is, near a rule's end).
    """
    try:
        controls = {name: Span.recorded(record["control"][name]) for name in claim.control}
        verdict, reason = judge(claim, Span.recorded(record), controls)
    except (KeyError, TypeError, ValueError) as error:
        return "inconclusive", f"its record is damaged ({error!r})"
    if record.get("verdict") == "inconclusive":
        return "inconclusive", str(record.get("reason"))
    return verdict, reason


def rule(claim: str, value: Any, *, control: Mapping[str, Any]) -> Ruling:
    """Rule on a claim with what was measured.

    Args:
        claim: ``"slug/id"``, as in the chapter's ``claims.yml``.
        value: a number, an estimate with ``value``, ``low`` and ``high``, or an Arb ball.
        control: the same measurement after each change that ``claims.yml`` names.

    Returns:
        The ruling; as a cell's last expression it shows a badge and leaves a record.

    Raises:
        ClaimError: unknown claim, a control missing or unknown, a value that is no number or NaN.
    """
    slug, _, claim_id = claim.partition("/")
    if not claim_id:
        raise ClaimError(f"claim {claim!r} needs the form 'chapter/claim-id'")
    found = load_claims(find_claims(slug))[claim_id]
    if found.needs:
        raise ClaimError(f"{claim} is blocked (needs {found.needs}): remove the call or the field")
    if not found.ruled_in:
        raise ClaimError(f"{claim} has no 'ruled_in': fix its rules in claims.yml, commit, re-run")
    if odd := set(control) ^ set(found.control):
        raise ClaimError(
            f"{claim}: control {', '.join(sorted(odd))} is missing or unknown; "
            f"claims.yml asks for {', '.join(found.control)}"
        )
    span = Span.of(value)
    controls = {name: Span.of(control[name], f"control {name}") for name in found.control}
    verdict, reason = judge(found, span, controls)
    ruling = Ruling(slug, found, span, controls, verdict, reason)
    if rejudge(found, ruling.record())[0] != verdict:
        doubt = f"too close to an end of the rule to tell at {found.digits} digits"
        ruling = dataclasses.replace(ruling, verdict="inconclusive", reason=doubt)
    return ruling
