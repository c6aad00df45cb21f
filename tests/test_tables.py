from __future__ import annotations

import pytest

from proofread.tables import Table


def test_text_is_aligned_and_html_is_escaped() -> None:
    table = Table(("loss", "accuracy"), [("a<b", 0.5), ("cross-entropy", "81.2")], "made up")
    assert repr(table).splitlines() == [
        "loss           accuracy",
        "a<b            0.5",
        "cross-entropy  81.2",
        "made up",
    ]
    assert "<td>a&lt;b</td><td>0.5</td>" in table._repr_html_()
    assert "made up" in table._repr_html_()


def test_a_ragged_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 1 entries, not 2"):
        Table(("a", "b"), [("x",)])
