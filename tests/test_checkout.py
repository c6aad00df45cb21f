from __future__ import annotations

from pathlib import Path

import pytest

from proofread.checkout import find_in_checkout


def test_the_nearest_folder_above_wins(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    (inner / "c").mkdir(parents=True)
    for folder in (tmp_path, inner):
        (folder / "book").mkdir()
        (folder / "book" / "x.yml").write_text(str(folder))
    assert find_in_checkout("book/x.yml", inner / "c") == inner / "book" / "x.yml"
    assert find_in_checkout("book/x.yml", tmp_path / "a") == tmp_path / "book" / "x.yml"


def test_this_packages_own_checkout_is_the_last_resort(tmp_path: Path) -> None:
    assert find_in_checkout("book/chapters/linear_core/claims.yml", tmp_path).is_file()


def test_the_error_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no nowhere\.yml in .*: run inside a checkout"):
        find_in_checkout("nowhere.yml", tmp_path)
