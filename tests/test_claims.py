from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from proofread import claims
from proofread.claims import MIME, ClaimError, Interval, Span, judge, load_claims, rule

HEAD = """
paper: {title: T, authors: [A], venue: V}
summary: S
claims:
"""
CLAIM = """
  - id: gain
    quote: q
    source: s
    says: It gains.
    kind: comparison
    measure: m
    unit: points
    accept: "(0, inf)"
    refute: "(-inf, 0]"
    control:
      down: {change: shuffled, expect: "(-inf, -10]"}
      up: {change: the peer shuffled, expect: "[10, inf)"}
    scale: {paper: large, book: small, reduced: true}
    ruled_in: experiments
"""


def _chapter(tmp_path: Path, text: str = HEAD + CLAIM) -> Path:
    folder = tmp_path / "book" / "chapters" / "demo"
    folder.mkdir(parents=True)
    (folder / "claims.yml").write_text(text)
    return folder


# --- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("[0, 1)", [0, 0.5], [1, -1e-300, math.nan]),
        ("(0, 1]", [1e-300, 1], [0, 1.0000001]),
        (">= 1", [1, math.inf], [0.9999999]),
        ("> 1", [1.0000001], [1]),
        ("<= -2", [-2, -math.inf], [-1.9]),
        ("== 0", [0, -0.0], [5e-324]),
        ("(-inf, inf)", [0, 1e308], [math.nan]),
    ],
)
def test_interval_membership(text: str, inside: list[float], outside: list[float]) -> None:
    interval = Interval.parse(text)
    assert all(x in interval for x in inside)
    assert not any(x in interval for x in outside)


@pytest.mark.parametrize("text", ["1", "[1, 0]", "(1, 1)", "[a, b]", "", "about 3", "[1; 2]"])
def test_an_unreadable_or_empty_interval_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"interval|no number|float"):
        Interval.parse(text)


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        ("[0, 1]", "[1, 2]", True),
        ("[0, 1)", "[1, 2]", False),
        ("< 0", "> 0", False),
        ("<= 0", ">= 0", True),
    ],
)
def test_overlap_is_decided_at_the_ends(a: str, b: str, meet: bool) -> None:
    assert Interval.parse(a).meets(Interval.parse(b)) is meet
    assert Interval.parse(b).meets(Interval.parse(a)) is meet


def test_within() -> None:
    assert Interval.parse("(0, 1)").within(Interval.parse("[0, 1]"))
    assert not Interval.parse("[0, 1)").within(Interval.parse("(0, 1)"))


# --- spans -------------------------------------------------------------------------------------


def test_span_takes_numbers_estimates_and_balls() -> None:
    flint = pytest.importorskip("flint")
    assert Span.of(2) == Span(2.0, 2.0, 2.0)
    assert Span.of(SimpleNamespace(value=1, low=0, high=3)) == Span(1.0, 0.0, 3.0)
    ball = Span.of(flint.arb(1) / 3)
    assert ball.low < 1 / 3 < ball.high or ball.low <= ball.value <= ball.high


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "NaN"),
        (math.inf, "infinite"),
        ("1", "no measurement"),
        (True, "no measurement"),
        (None, "no number"),
        ([1, 2], "no number"),
        (SimpleNamespace(value=0, low=1, high=2), "outside its interval"),
    ],
)
def test_span_refuses_what_is_no_measurement(value: object, said: str) -> None:
    with pytest.raises(ClaimError, match=said):
        Span.of(value)


def test_an_unbounded_interval_survives_the_record() -> None:
    span = Span(1.0, -math.inf, math.inf)
    assert span.rounded(3) == {"value": 1.0, "low": "-inf", "high": "inf"}
    assert Span.recorded(span.rounded(3)) == span


# --- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "down", "up", "verdict", "reason"),
    [
        ((1, 0.5, 1.5), -50, 50, "holds at reduced scale", "small"),
        ((-1, -2, 0), -50, 50, "refuted", "at reduced scale"),
        ((1, -0.5, 2.5), -50, 50, "inconclusive", "between"),
        ((1, 0.5, 1.5), -5, 50, "inconclusive", "down"),
        ((1, 0.5, 1.5), -50, 5, "inconclusive", "up"),
    ],
)
def test_verdict_table(
    tmp_path: Path, value: tuple[float, ...], down: float, up: float, verdict: str, reason: str
) -> None:
    claim = load_claims(_chapter(tmp_path) / "claims.yml")["gain"]
    controls = {"down": Span.of(down), "up": Span.of(up)}
    got, why = judge(claim, Span(*value), controls)
    assert got == verdict
    assert reason in why


def test_without_a_flipped_control_there_is_no_verdict(tmp_path: Path) -> None:
    text = (HEAD + CLAIM).replace(
        '      up: {change: the peer shuffled, expect: "[10, inf)"}\n', ""
    )
    claim = load_claims(_chapter(tmp_path, text) / "claims.yml")["gain"]
    verdict, why = judge(claim, Span.of(-1.0), {"down": Span.of(-50.0)})
    assert verdict == "inconclusive"
    assert "no control flipped" in why


def test_full_scale_is_verified_and_wording_is_fixed(tmp_path: Path) -> None:
    text = (HEAD + CLAIM).replace("reduced: true", "reduced: false")
    claim = load_claims(_chapter(tmp_path, text) / "claims.yml")["gain"]
    controls = {"down": Span.of(-50.0), "up": Span.of(50.0)}
    assert judge(claim, Span.of(1.0), controls)[0] == "verified"
    assert set(claims.VERDICTS) >= {"verified", "refuted", "blocked", "planned"}


@pytest.mark.parametrize("reduced", ["true", "false"])
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_a_verdict_on_our_own_construction_says_so(
    tmp_path: Path, reduced: str, value: float
) -> None:
    said = "of our reading of the loss"
    text = (HEAD + CLAIM).replace("reduced: true", f"reduced: {reduced}")
    text = text.replace("    kind:", f"    construction: {said}\n    kind:", 1)
    claim = load_claims(_chapter(tmp_path, text) / "claims.yml")["gain"]
    _, why = judge(claim, Span.of(value), {"down": Span.of(-50.0), "up": Span.of(50.0)})
    assert why.endswith(f"; {said}")


# --- rule --------------------------------------------------------------------------------------


def test_rule_shows_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_chapter(tmp_path))
    value = SimpleNamespace(value=1.23456, low=0.5, high=2.0)
    ruling = rule("demo/gain", value, control={"up": 50.0, "down": -50.0})
    shown = ruling._repr_mimebundle_()
    record = shown[MIME]
    assert record["claim"] == "demo/gain"
    assert (record["value"], record["low"], record["high"]) == (1.23, 0.5, 2.0)
    assert record["verdict"] == "holds at reduced scale"
    assert list(record["control"]) == ["down", "up"], "in the order of claims.yml"
    assert 'id="claim-demo-gain"' in shown["text/html"]
    assert "1.23 [0.5, 2] (points)" in shown["text/plain"]


def test_a_value_within_rounding_of_the_rule_is_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record holds rounded numbers, and the verdict must follow from the record alone."""
    text = (HEAD + CLAIM).replace('"(0, inf)"', '"[1, inf)"').replace("(-inf, 0]", "(-inf, 1)")
    monkeypatch.chdir(_chapter(tmp_path, text))
    ruling = rule("demo/gain", 0.9999, control={"up": 50.0, "down": -50.0})
    assert ruling.record()["value"] == 1.0
    assert ruling.verdict == "inconclusive"
    assert "too close to an end of the rule" in ruling.reason


def test_rejudging_a_record_ignores_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_chapter(tmp_path))
    ruling = rule("demo/gain", -1.0, control={"up": 50.0, "down": -50.0})
    assert ruling.verdict == "refuted"
    forged = ruling.record() | {"verdict": "verified", "reason": "proved"}
    assert claims.rejudge(ruling.claim, forged) == ("refuted", "at reduced scale")
    assert claims.rejudge(ruling.claim, {"verdict": "verified"})[0] == "inconclusive"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    text = (HEAD + CLAIM).replace("    unit: points\n", "    unit: points\n    unit: percent\n")
    with pytest.raises(ClaimError, match="unit twice"):
        load_claims(_chapter(tmp_path, text) / "claims.yml")


def test_html_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (HEAD + CLAIM).replace("It gains.", "'a < b & <script>'")
    monkeypatch.chdir(_chapter(tmp_path, text))
    shown = rule("demo/gain", 1.0, control={"up": 50.0, "down": -50.0})._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


@pytest.mark.parametrize(
    ("claim", "control", "said"),
    [
        ("gain", {}, "needs the form"),
        ("demo/loss", {}, "unknown claim 'loss': claims.yml has gain"),
        ("nobody/gain", {}, "no claims.yml of chapter 'nobody'"),
        ("demo/gain", {"up": 1.0}, "control down is missing or unknown"),
        ("demo/gain", {"up": 1.0, "down": 1.0, "side": 1.0}, "control side is missing or unknown"),
        ("demo/gain", {"up": 1.0, "down": math.nan}, "control down is NaN"),
    ],
)
def test_rule_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: str, control: dict, said: str
) -> None:
    monkeypatch.chdir(_chapter(tmp_path))
    with pytest.raises(ClaimError, match=said.replace("(", r"\(")):
        rule(claim, 1.0, control=control)


def test_rule_works_from_the_root_and_from_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _chapter(tmp_path)
    for place in (tmp_path, tmp_path / "book", folder):
        monkeypatch.chdir(place)
        assert rule("demo/gain", 1.0, control={"up": 50.0, "down": -50.0}).slug == "demo"


# --- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('refute: "(-inf, 0]"', 'refute: "(-inf, 1]"', "overlap"),
        ('    accept: "(0, inf)"\n', "", "it needs accept"),
        ("kind: comparison", "kind: opinion", "kind"),
        ("id: gain", "id: Gain!", "id"),
        ("    says: It gains.\n", "", "says"),
        ("    unit: points\n", "    unit: points\n    verdict: verified\n", "verdict"),
        ('"(-inf, -10]"', '"about -10"', "no interval"),
        ("paper: {title", "paper: [{title", "YAML"),
    ],
)
def test_schema_errors_name_the_file_and_the_field(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in HEAD + CLAIM
    path = _chapter(tmp_path, (HEAD + CLAIM).replace(old, new)) / "claims.yml"
    with pytest.raises(ClaimError, match=said) as caught:
        load_claims(path)
    assert "claims.yml" in str(caught.value)


def test_ids_stand_once(tmp_path: Path) -> None:
    path = _chapter(tmp_path, HEAD + CLAIM + CLAIM.lstrip("\n")) / "claims.yml"
    with pytest.raises(ClaimError, match="stand twice: gain"):
        load_claims(path)


def test_no_control_that_could_flip_is_refused(tmp_path: Path) -> None:
    text = (HEAD + CLAIM).replace('"(-inf, -10]"', '"[-1, 1]"').replace('"[10, inf)"', '"[-1, 1]"')
    with pytest.raises(ClaimError, match="none can flip"):
        load_claims(_chapter(tmp_path, text) / "claims.yml")


def test_the_rules_digest_follows_the_rules_alone(tmp_path: Path) -> None:
    base = load_claims(_chapter(tmp_path / "a") / "claims.yml")["gain"]
    says = (HEAD + CLAIM).replace("It gains.", "It gains a lot.")
    accept = (HEAD + CLAIM).replace('"(0, inf)"', '"(1, inf)"')
    assert (
        load_claims(_chapter(tmp_path / "b", says) / "claims.yml")["gain"].rules_digest
        == base.rules_digest
    )
    assert (
        load_claims(_chapter(tmp_path / "c", accept) / "claims.yml")["gain"].rules_digest
        != base.rules_digest
    )


def test_blocked_needs_no_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + "  - {id: gpu, quote: q, source: s, says: S., kind: magnitude, needs: 64 GPUs}\n"
    monkeypatch.chdir(_chapter(tmp_path, text))
    with pytest.raises(ClaimError, match=r"blocked \(needs 64 GPUs\)"):
        rule("demo/gpu", 1.0, control={})
