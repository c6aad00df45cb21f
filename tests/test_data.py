"""Data layer: contracts of each set, hashes, tiers that never swap, and every way a file can fail.

A tiny two-class set in a registry of its own plays Fashion-MNIST's part where files get damaged.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import os
import pickle
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofread import data
from proofread.data import DataCorrupt, DataNotFound, Dataset, GaussianMixture, RegistryError, load

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
# As published; also pinned by several public projects that fetch the original files.
PUBLISHED = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
needs_debian = pytest.mark.skipif(
    not DEBIAN.is_dir(), reason="needs the Debian package dataset-fashion-mnist"
)


@pytest.fixture(autouse=True)
def _nothing_of_the_users(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No home, no cache and no data folder of whoever runs the tests; no network either."""
    for name in ("PROOFREAD_DATA", "TORCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    empty = tmp_path_factory.mktemp("home") / "work"
    empty.mkdir()
    monkeypatch.setenv("HOME", str(empty.parent))
    monkeypatch.chdir(empty)

    def refuse(*_: object) -> None:
        raise AssertionError("a data set touched the network")

    monkeypatch.setattr("socket.socket.connect", refuse)


# --- contracts of the sets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "tier", "shape", "per_class", "sha"),
    [
        ("fashion_mnist", "embedded", (28, 28), (500, 100), "f285cabb"),
        ("digits", "package", (8, 8), (140, 34), "d89f7629"),
        pytest.param(
            "fashion_mnist", "package", (28, 28), (6000, 1000), "683ddcce", marks=needs_debian
        ),
    ],
)
def test_contract(
    id: str, tier: str, shape: tuple[int, ...], per_class: tuple[int, int], sha: str
) -> None:
    d = load(id, tier=tier)
    assert (d.id, d.tier, d.n_classes, len(d.class_names)) == (id, tier, 10, 10)
    for x, y, n in ((d.x_train, d.y_train, per_class[0]), (d.x_test, d.y_test, per_class[1])):
        assert x.dtype == np.uint8
        assert x.shape == (10 * n, *shape)
        assert y.dtype == np.int64
        np.testing.assert_array_equal(np.bincount(y), [n] * 10)
        assert int(x.max()) == d.scale
    assert not {a.tobytes() for a in d.x_train} & {a.tobytes() for a in d.x_test}
    assert d.sha256.startswith(sha)
    again = load(id, tier=tier)
    assert all(getattr(d, p).tobytes() == getattr(again, p).tobytes() for p in data.PARTS)
    assert again.sha256 == d.sha256


def test_every_registered_tier_has_a_contract_above() -> None:
    ids = {(e.id, t) for e in data.registry().values() for t in e.tiers}
    real = {("fashion_mnist", "real")}  # in test_torchvision_layout
    covered = {("fashion_mnist", "embedded"), ("fashion_mnist", "package"), ("digits", "package")}
    assert ids == covered | real


def test_labels_for_captions() -> None:
    d = load("fashion_mnist", tier="embedded")
    assert d.label == (
        "Fashion-MNIST subset, embedded tier, 5,000 train / 1,000 test, sha256 f285cabb"
    )
    assert repr(d) == f"<{d.label}>"
    assert d.is_subset
    assert d.stands_in_for == "the whole of Fashion-MNIST (60,000 train / 10,000 test)"
    assert d.class_names[0] == "T-shirt/top"
    assert d.class_names[9] == "Ankle boot"
    assert "Zalando" in d.licence
    assert d.selection == "first 500 train / 100 test of each class, in file order"
    assert load("digits").label == (
        "UCI digits subset, package tier, 1,400 train / 340 test, sha256 d89f7629"
    )


def test_no_path_of_this_machine_reaches_a_page() -> None:
    d = load("fashion_mnist", tier="embedded")
    assert d.location is not None
    assert str(d.location) not in f"{d!r} {d.label} {d.source} {d.selection} {d.licence}"


def _idx(array: np.ndarray) -> bytes:
    """An idx file of bytes, after its format's description."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + bytes(
        array.astype(np.uint8)
    )


def test_hashes_are_of_idx_files_and_sha256sum_lines() -> None:
    d = load("digits")
    parts = {p: hashlib.sha256(_idx(getattr(d, p))).hexdigest() for p in data.PARTS}
    assert d.part_sha256 == parts
    lines = "".join(f"{h}  {p}\n" for p, h in parts.items())
    assert d.sha256 == hashlib.sha256(lines.encode()).hexdigest()


def test_one_changed_pixel_or_label_changes_the_hash() -> None:
    d = load("digits")
    pixel, label = d.x_test.copy(), d.y_test.copy()
    pixel[0, 0, 0] ^= 1
    label[0] = (label[0] + 1) % 10
    assert len({d.sha256, replace(d, x_test=pixel).sha256, replace(d, y_test=label).sha256}) == 3


def test_digits_are_scikit_learns() -> None:
    sk = pytest.importorskip("sklearn.datasets").load_digits()
    d = load("digits")
    rows = [np.flatnonzero(sk.target == c) for c in range(10)]
    for x, y, cut in ((d.x_train, d.y_train, slice(140)), (d.x_test, d.y_test, slice(140, 174))):
        at = np.sort(np.concatenate([r[cut] for r in rows]))
        np.testing.assert_array_equal(x, sk.images[at])
        np.testing.assert_array_equal(y, sk.target[at])


@needs_debian
def test_debian_package_has_the_published_content() -> None:
    d = load("fashion_mnist", tier="package")
    assert list(d.part_sha256.values()) == list(PUBLISHED.values())
    assert d.label == ("Fashion-MNIST, package tier, 60,000 train / 10,000 test, sha256 683ddcce")
    assert not d.is_subset
    assert d.stands_in_for is None
    assert load("fashion_mnist", tier="full").tier == "package"


@needs_debian
def test_embedded_is_the_documented_selection_of_the_package(tmp_path: Path) -> None:
    small = load("fashion_mnist", tier="embedded")
    for part, per_class in (("train", 500), ("t10k", 100)):
        images = gzip.decompress((DEBIAN / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((DEBIAN / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
        seen, keep = [0] * 10, []
        for row, label in enumerate(labels):  # in file order, the first so many of each class
            if seen[label] < per_class:
                seen[label] += 1
                keep.append(row)
        split = "train" if part == "train" else "test"
        expected = b"".join(images[784 * r : 784 * (r + 1)] for r in keep)
        assert getattr(small, f"x_{split}").tobytes() == expected
        assert bytes(getattr(small, f"y_{split}").tolist()) == bytes(labels[r] for r in keep)
    taken = load("fashion_mnist", tier="full").take(5000, 1000)
    assert taken.sha256 == small.sha256
    assert taken.label.startswith("Fashion-MNIST subset, package tier, 5,000 train / 1,000 test")


@needs_debian
@pytest.mark.parametrize("unzipped", [False, True], ids=["gz", "plain"])
def test_torchvision_layout_with_the_true_bytes(
    unzipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in DEBIAN.iterdir():
        if unzipped:
            (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        else:
            (raw / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    found = load("fashion_mnist")  # ./data comes before the package
    assert found.tier == "real"
    assert list(found.part_sha256.values()) == list(PUBLISHED.values())
    assert found.location == raw


def test_embedded_file_is_small_safe_and_quick() -> None:
    file = data._own_folder() / "fashion_mnist.npz"
    assert file.stat().st_size < 3_000_000
    with np.load(file, allow_pickle=False) as archive:
        assert sorted(archive.files) == sorted(data.PARTS)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        _ = load("fashion_mnist", tier="embedded").label
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


def test_import_and_load_are_light_and_seen_by_an_audit_hook() -> None:
    """The stamp of a notebook notes the files that its kernel opens, by an audit hook."""
    code = """
import sys
opened = []
sys.addaudithook(lambda e, a: opened.append((str(a[0]), a[1])) if e == "open" else None)
from proofread.data import load
assert load("fashion_mnist", tier="embedded").n_train == 5000
assert load("digits").n_train == 1400
heavy = {"torch", "sklearn", "scipy", "matplotlib", "pandas"} & set(sys.modules)
assert not heavy, heavy
assert not any("w" in (mode or "") for name, mode in opened if "datasets" in name)
print(*(name for name, mode in opened if "/datasets/" in name), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = data._own_folder()
    for name in ("registry.toml", "fashion_mnist.npz"):
        assert str(folder / name) in done.stdout.splitlines()
    assert done.stderr == ""


# --- the Dataset object -------------------------------------------------------------------------


def _small(**changes: Any) -> Dataset:
    x = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    y = np.array([0, 1, 0, 1, 0, 1])
    fields: dict[str, Any] = {
        "id": "s",
        "name": "S",
        "tier": "real",
        "licence": "L",
        "source": "made here",
        "scale": 2,
        "x_train": x,
        "y_train": y,
        "x_test": x[:4],
        "y_test": y[:4],
        "class_names": ("a", "b"),
    }
    return Dataset(**{**fields, **changes})


def test_arrays_are_scaled_flat_fresh_and_float32() -> None:
    d = load("fashion_mnist", tier="embedded")
    a = d.arrays()
    assert a.x_train.shape == (5000, 784)
    assert a.x_train.dtype == np.float32
    assert (float(a.x_train.min()), float(a.x_train.max())) == (0.0, 1.0)
    np.testing.assert_array_equal(a.x_test[3], (d.x_test[3].ravel() / 255).astype(np.float32))
    a.y_train[0] = 7  # theirs to change
    a.x_train[0] = 7
    assert d.sha256 == load("fashion_mnist", tier="embedded").sha256
    assert d.arrays(flat=False).x_test.shape == (1000, 28, 28)


def test_tensors_equal_arrays_without_a_warning() -> None:
    torch = pytest.importorskip("torch")
    d = load("digits")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t = d.tensors()
        moved = d.tensors(device="cpu", flat=False)
    assert [p.dtype for p in t] == [torch.float32, torch.int64] * 2
    for tensor, array in zip(t, d.arrays(), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert moved.x_train.shape == (1400, 8, 8)
    assert float(t.x_test.max()) == 1.0  # of 16, the digits' own scale


def test_arrays_of_a_data_set_are_read_only_but_the_callers_are_not() -> None:
    x = np.zeros((2, 1))
    d = _small(x_train=x, y_train=np.array([0, 1]), x_test=x, y_test=np.array([0, 1]))
    with pytest.raises(ValueError, match="read-only"):
        d.x_train[0] = 1
    x[0] = 0.0
    with pytest.raises(AttributeError):
        d.tier = "embedded"  # type: ignore[misc]


def test_take_keeps_the_first_of_each_class_in_order() -> None:
    d = _small().take(4, 2)
    np.testing.assert_array_equal(d.x_train[:, 0, 0], [0, 4, 8, 12])
    np.testing.assert_array_equal(d.y_test, [0, 1])
    assert d.selection == "first 2 train / 1 test of each class, in file order"
    only = _small(y_train=np.array([1, 1, 0, 0, 0, 1])).take(train=2)
    np.testing.assert_array_equal(only.x_train[:, 0, 0], [0, 8])
    assert (only.n_test, only.selection) == (4, "first 1 train of each class, in file order")
    whole = _small()
    assert whole.take() is whole


@pytest.mark.parametrize("n", [0, -2, 3, 2.0, True, "2"])
def test_take_refuses_unbalanced_sizes(n: Any) -> None:
    with pytest.raises(ValueError, match="must be a positive multiple of 2"):
        _small().take(train=n)


def test_take_refuses_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"asks for 3 .* smallest has 2; at most test=4"):
        _small().take(test=6)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"y_train": np.array([0, 1, 0, 1, 0, 2])}, ValueError, "labels 0 … 2, but there are 2"),
        ({"y_train": np.array([0, 1, 0, 1, 0, -1])}, ValueError, "labels -1 … 1"),
        ({"y_train": np.array([0, 1])}, ValueError, r"x_train must be \[N, ...\]"),
        ({"y_train": np.zeros(6)}, TypeError, "y_train must be int64, not float64"),
        ({"x_test": np.zeros((4, 2, 2), bool)}, TypeError, "x_test must be uint8"),
        ({"x_test": np.zeros((4, 3))}, ValueError, r"shape \(2, 2\) in x_train and \(3,\)"),
        ({"x_test": np.zeros((0, 2, 2)), "y_test": np.zeros(0, int)}, ValueError, "N ≥ 1"),
        ({"x_train": np.zeros(6)}, ValueError, r"not \[6\] and \[6\]"),
    ],
)
def test_data_that_do_not_fit_together(changes: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        _small(**changes)


def test_strided_and_byte_swapped_arrays_hash_by_content() -> None:
    x = np.linspace(0, 1, 24).reshape(6, 4)
    plain = _small(x_train=x, x_test=x[:4])
    odd = _small(x_train=np.asfortranarray(x.astype(">f8")), x_test=np.repeat(x, 2, axis=0)[:8:2])
    assert plain.sha256 == odd.sha256
    assert plain.sha256 != _small(x_train=x.astype("f4"), x_test=x[:4].astype("f4")).sha256


def test_many_classes_hash_and_save(tmp_path: Path) -> None:
    names = tuple(map(str, range(300)))
    d = _small(y_train=np.array([0, 1, 2, 3, 4, 299]), class_names=names)
    assert len(d.sha256) == 64
    with np.load(d.save(tmp_path / "m.npz")) as archive:
        np.testing.assert_array_equal(archive["y_train"], d.y_train)


def test_save_is_reproducible_and_checks_its_name(tmp_path: Path) -> None:
    one, two = _small().save(tmp_path / "a.npz"), _small().save(tmp_path / "b.npz")
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        _small().save(tmp_path / "a.npy")


# --- where it looks, and what it says -----------------------------------------------------------

FILES = tuple(PUBLISHED)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A set of 6 + 4 images of 2 × 2 in a registry of its own: embedded there, package absent."""
    own = tmp_path / "own"
    own.mkdir()
    d = _small(id="tiny", name="Tiny", whole=(6, 4))
    small = d.take(4, 2)
    small.save(own / "tiny.npz")
    entry = f"""
    [tiny]
    name = "Tiny"
    licence = "CC0"
    may_commit = true
    homepage = "none"
    shape = [2, 2]
    scale = 2
    whole = [6, 4]
    classes = ["a", "b"]
    [tiny.real]
    like = "package"
    source = "a folder of the user's"
    folders = [".", "Tiny/raw"]
    shared = ["Tiny/raw"]
    get = "fetch tiny"
    [tiny.package]
    format = "idx"
    source = "package tiny"
    folders = ["{own / "package"}"]
    get = "install tiny"
    repair = "reinstall tiny"
    size = "1 kB"
    train = 6
    test = 4
    [tiny.package.sha256]
    {_toml(zip(FILES, d.part_sha256.values(), strict=True))}
    [tiny.embedded]
    format = "npz"
    file = "tiny.npz"
    source = "here"
    selection = "first 2 / 1 of each class"
    folders = ["{own}"]
    get = "nothing to do"
    repair = "check it out again"
    size = "1 kB"
    train = 4
    test = 2
    [tiny.embedded.sha256]
    {_toml(small.part_sha256.items())}
    """
    (own / "registry.toml").write_text(entry)
    monkeypatch.setattr(data, "_own_folder", lambda: own)
    return d


def _toml(pairs: Any) -> str:
    return "\n".join(f'"{key}" = "{value}"' for key, value in pairs)


def _write(d: Dataset, folder: Path, *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(FILES, data.PARTS, strict=True):
        content = _idx(getattr(d, part))
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def _bare(d: Dataset) -> bytes:
    return b"".join(getattr(d, part).tobytes() for part in data.PARTS)


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("below", ["", "Tiny/raw"])
def test_explicit_path(tiny: Dataset, tmp_path: Path, zipped: bool, below: str) -> None:
    _write(tiny, tmp_path / "mine" / below, zipped=zipped)
    found = load("tiny", path=tmp_path / "mine")
    assert (found.tier, found.is_subset, found.source) == ("real", False, "a folder of the user's")
    assert _bare(found) == _bare(tiny)


def test_home_is_expanded(tiny: Dataset) -> None:
    _write(tiny, Path(os.environ["HOME"]) / "mine")
    assert load("tiny", path="~/mine", tier="real").tier == "real"


def test_a_browser_that_unzipped_and_kept_the_name_is_no_error(
    tiny: Dataset, tmp_path: Path
) -> None:
    folder = _write(tiny, tmp_path / "mine")
    for name in FILES:
        (folder / name).rename(folder / f"{name}.gz")
    assert _bare(load("tiny", path=folder)) == _bare(tiny)


@pytest.mark.parametrize("below", ["tiny", "tiny/Tiny/raw", "Tiny/raw"])
def test_environment_variable(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    _write(tiny, tmp_path / "mine" / below)
    monkeypatch.setenv("PROOFREAD_DATA", str(tmp_path / "mine"))
    for tier in ("auto", "full", "real"):
        found = load("tiny", tier=tier)
        assert (found.tier, found.location) == ("real", tmp_path / "mine" / below)


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HOME", "data"),
        ("HOME", ".cache/torch/datasets/vision"),
        ("XDG_CACHE_HOME", "torch/datasets"),
        ("TORCH_HOME", "datasets"),
    ],
)
def test_torchvision_roots(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    folder = _write(tiny, tmp_path / below / "Tiny" / "raw", zipped=True)
    assert load("tiny").location == folder


def test_order_of_the_search(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def where(**request: Any) -> tuple[str, Path | None]:
        found = load("tiny", **request)
        return found.tier, found.location

    own, mine = tmp_path / "own", tmp_path / "mine"
    assert where() == ("embedded", own)
    _write(tiny, own / "package")
    assert where() == ("package", own / "package")
    _write(tiny, Path("data/Tiny/raw"))
    assert where() == ("real", Path.cwd() / "data/Tiny/raw")
    _write(tiny, mine / "tiny")
    monkeypatch.setenv("PROOFREAD_DATA", str(mine))
    assert where() == ("real", mine / "tiny")
    _write(tiny, tmp_path / "given")
    assert where(path=tmp_path / "given") == ("real", tmp_path / "given")
    assert where(tier="package") == ("package", own / "package")
    assert where(tier="embedded") == ("embedded", own)


@pytest.mark.parametrize("tier", ["real", "package", "full"])
def test_a_missing_tier_never_falls_back(tiny: Dataset, tier: str) -> None:
    assert load("tiny").tier == "embedded"
    with pytest.raises(DataNotFound):
        load("tiny", tier=tier)


def test_text_of_not_found() -> None:
    with pytest.raises(DataNotFound) as caught:
        load("fashion_mnist", tier="real")
    text = str(caught.value).replace(os.environ["HOME"], "~")
    assert text == (
        """\
Fashion-MNIST: no real tier on this machine
  searched: $PROOFREAD_DATA/fashion_mnist (PROOFREAD_DATA is not set)
            data/{FashionMNIST/raw,FashionMNIST/data/fashion}
            ../data/{FashionMNIST/raw,FashionMNIST/data/fashion}
            ~/data/{FashionMNIST/raw,FashionMNIST/data/fashion}
            ~/.cache/torch/datasets/{FashionMNIST/raw,FashionMNIST/data/fashion}
            ~/.cache/torch/datasets/vision/{FashionMNIST/raw,FashionMNIST/data/fashion}
  get it:   git clone --depth 1 https://github.com/zalandoresearch/fashion-mnist """
        """~/data/FashionMNIST
  licence:  MIT, (c) 2017 Zalando SE
  size:     31 MB, 60,000 train / 10,000 test
  instead:  load("fashion_mnist", tier="embedded"), 5,000 train / 1,000 test, needs nothing"""
    )
    assert isinstance(caught.value, FileNotFoundError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_full_not_found_names_the_package(tiny: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataNotFound) as caught:
        load("tiny", tier="full")
    text = str(caught.value)
    assert text.startswith("Tiny: no real or package tier on this machine\n")
    assert f"\n            {tmp_path}/own/package\n  get it:   install tiny\n" in text


def test_missing_python_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.util, "find_spec", lambda _: None)
    with pytest.raises(DataNotFound, match=r"sklearn \(not installed\)\n  get it: +pip install"):
        load("digits")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "does not hold its files"),
        (lambda p: p.write_text("x"), "is a file, not a folder"),
    ],
    ids=["absent", "empty", "file"],
)
def test_explicit_path_is_never_replaced(
    tiny: Dataset, tmp_path: Path, make: Any, text: str
) -> None:
    make(tmp_path / "given")
    _write(tiny, Path("data/Tiny/raw"))
    with pytest.raises(DataNotFound, match=f"path={tmp_path}/given {text}\n  searched: .*given"):
        load("tiny", path=tmp_path / "given")


def test_variable_that_names_no_folder_is_an_error(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROOFREAD_DATA", str(tmp_path / "typo"))
    with pytest.raises(DataNotFound, match=r"PROOFREAD_DATA is set to .*typo, which is no folder"):
        load("tiny")
    assert load("tiny", tier="embedded").tier == "embedded"
    monkeypatch.setenv("PROOFREAD_DATA", "")
    assert load("tiny").tier == "embedded"


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ({"id": "fashion_mnits"}, "did you mean 'fashion_mnist'. Known: fashion_mnist, digits"),
        ({"id": ""}, "Known: fashion_mnist, digits"),
        ({"id": "digits", "tier": "best"}, "tier='best' must be one of auto, full, real, package"),
        ({"id": "digits", "tier": "real"}, 'no tier that tier="real" may use; it has: package'),
        ({"id": "digits", "path": "x"}, "leave one of the two out"),
        ({"id": "fashion_mnist", "path": "x", "tier": "embedded"}, "leave one of the two out"),
        ({"id": "fashion_mnist", "path": ""}, "path is empty"),
    ],
)
def test_bad_requests(request_: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load(**request_)
    assert not isinstance(caught.value, DataCorrupt)


# --- damaged files ------------------------------------------------------------------------------


def _flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGE = {
    "one bit": (_flip, "an idx file with other content"),
    "empty": (lambda c: b"", "it is empty"),
    "short": (lambda c: c[:-3], "it has 37 bytes where its header promises 40"),
    "long": (lambda c: c + b"\0", "it has 41 bytes where its header promises 40"),
    "magic": (lambda c: b"\1" + c[1:], "wrong magic number"),
    "two bytes": (lambda c: c[:2], "wrong magic number"),
    "three bytes": (lambda c: c[:3], "wrong magic number"),
    "no sizes": (lambda c: c[:7], "wrong magic number"),
    "web page": (lambda c: b"<html>404", "wrong magic number"),
    "gz cut": (lambda c: gzip.compress(c)[:-9], "truncated"),
    "gz head only": (lambda c: b"\x1f\x8b", "truncated|damaged"),
    "gz crc": (lambda c: _flip(gzip.compress(c)[:-4]) + gzip.compress(c)[-4:], "damaged: CRC"),
    "gz noise": (lambda c: gzip.compress(c)[:12] + b"\xff" * 40, "damaged"),
    "gz of nothing": (lambda c: gzip.compress(b""), "it is empty"),
    "gz of other": (lambda c: gzip.compress(_flip(c)), "an idx file with other content"),
}


@pytest.mark.parametrize("tier", ["auto", "full", "package"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_an_error_in_every_mode(
    tiny: Dataset, tmp_path: Path, damage: str, tier: str
) -> None:
    folder = _write(tiny, tmp_path / "own" / "package")
    change, fault = DAMAGE[damage]
    file = folder / FILES[0]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataCorrupt, match=fault) as caught:
        load("tiny", tier=tier)
    text = str(caught.value)
    assert str(file) in text
    assert f"expected: {tiny.part_sha256['x_train']} (sha256" in text
    assert "reinstall tiny" in text
    assert 'load("tiny", tier="embedded")' in text


def test_text_of_corrupt(tiny: Dataset, tmp_path: Path) -> None:
    folder = _write(tiny, tmp_path / "mine")
    (folder / FILES[3]).write_bytes(b"")
    with pytest.raises(DataCorrupt) as caught:
        load("tiny", path=folder)
    assert (
        str(caught.value)
        == f"""\
Tiny, real tier: a file is there but not usable
  file:     {folder / FILES[3]}
  fault:    it is empty
  expected: {tiny.part_sha256["y_test"]} (sha256 of the decompressed content)
  found:    {hashlib.sha256(b"").hexdigest()}
  remedy:   remove it, then: fetch tiny
  instead:  load("tiny", tier="embedded"), 4 train / 2 test, needs nothing"""
    )


@pytest.mark.parametrize("place", ["path", "variable", "torchvision", "package"])
def test_no_place_is_skipped_when_damaged(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folders = {
        "path": tmp_path / "given",
        "variable": tmp_path / "mine" / "tiny",
        "torchvision": Path.cwd() / "data/Tiny/raw",
        "package": tmp_path / "own" / "package",
    }
    monkeypatch.setenv("PROOFREAD_DATA", str(tmp_path))
    if place == "variable":
        monkeypatch.setenv("PROOFREAD_DATA", str(tmp_path / "mine"))
    file = _write(tiny, folders[place]) / FILES[1]
    file.write_bytes(_flip(file.read_bytes()))
    with pytest.raises(DataCorrupt, match=str(file)):
        load("tiny", path=folders["path"] if place == "path" else None)


def test_a_part_of_the_files_is_an_error(tiny: Dataset, tmp_path: Path) -> None:
    folder = _write(tiny, tmp_path / "own" / "package")
    (folder / FILES[2]).unlink()
    with pytest.raises(DataCorrupt, match=f"holds a part of the set only; missing: {FILES[2]}"):
        load("tiny")


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_directory, "not a regular file"),
        (_pipe, "not a regular file"),
        (_dangling, "No such file"),
        (_loop, "symbolic links"),
    ],
    ids=["directory", "pipe", "dangling link", "link to itself"],
)
@pytest.mark.parametrize("name", [FILES[0], "tiny.npz"])
def test_things_that_are_not_files(
    tiny: Dataset, tmp_path: Path, spoil: Any, fault: str, name: str
) -> None:
    folder = tmp_path / "own" if name == "tiny.npz" else _write(tiny, tmp_path / "own/package")
    spoil(folder / name)
    with pytest.raises(DataCorrupt, match=f"cannot be read: .*{fault}"):
        load("tiny")


def _denied(real: Any, match: str) -> Any:
    def wrapper(file: Any, *rest: Any, **options: Any) -> Any:
        if match in str(file):
            raise PermissionError(13, "Permission denied")
        return real(file, *rest, **options)

    return wrapper


def test_unreadable_file(tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tiny, tmp_path / "own" / "package")
    monkeypatch.setattr("builtins.open", _denied(open, FILES[0]))  # root reads whatever it likes
    with pytest.raises(DataCorrupt, match="cannot be read: Permission denied"):
        load("tiny")


def test_unreadable_folder(tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usual place that nobody asked for is passed over, one that was named is not."""
    monkeypatch.setattr("os.lstat", _denied(os.lstat, "/.cache/"))
    assert load("tiny").tier == "embedded"
    (tmp_path / ".cache").mkdir()
    with pytest.raises(DataCorrupt, match="cannot be looked into: Permission denied"):
        load("tiny", path=tmp_path / ".cache" / "x")
    monkeypatch.setenv("PROOFREAD_DATA", str(tmp_path / ".cache"))
    with pytest.raises(DataCorrupt, match="cannot be looked into"):
        load("tiny")


NPZ_DAMAGE = {
    "empty": b"",
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "pickle": pickle.dumps([1, 2, 3]),
    "zip head": b"PK\3\4" + b"\0" * 40,
}


@pytest.mark.parametrize("damage", NPZ_DAMAGE)
def test_damaged_embedded_file(tiny: Dataset, tmp_path: Path, damage: str) -> None:
    (tmp_path / "own" / "tiny.npz").write_bytes(NPZ_DAMAGE[damage])
    with pytest.raises(DataCorrupt, match="not a sound npz file") as caught:
        load("tiny")
    assert "check it out again" in str(caught.value)
    assert "instead" not in str(caught.value)  # it is the alternative that failed


def test_embedded_file_cut_or_flipped_anywhere(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small file is cut at each byte, and each byte is changed: no damage is read as data."""
    file = tmp_path / "own" / "tiny.npz"
    sound, good, entries = file.read_bytes(), _bare(load("tiny")), data.registry()
    monkeypatch.setattr(data, "registry", lambda: entries)
    for at in range(len(sound)):
        file.write_bytes(sound[:at])
        with pytest.raises(DataCorrupt):
            load("tiny")
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 0x55]) + sound[at + 1 :])
        with contextlib.suppress(DataCorrupt):
            assert _bare(load("tiny")) == good  # a changed date, say, is no damage


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"x_train": np.zeros((4, 2, 2), np.uint8)}, "array x_train is not what it should be"),
        ({"y_test": np.array([0.0, 1.0])}, "array y_test is not what it should be"),
        ({"y_test": np.array(["a", None])}, "not a sound npz file: Object arrays"),
        ({"y_test": None}, "not a sound npz file: .*y_test"),
    ],
    ids=["other images", "other dtype", "objects", "missing"],
)
def test_embedded_file_with_other_arrays(
    tiny: Dataset, tmp_path: Path, change: Any, fault: str
) -> None:
    file = tmp_path / "own" / "tiny.npz"
    with np.load(file) as archive:
        arrays: dict[str, Any] = {**archive, **change}
    np.savez(file, **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(DataCorrupt, match=fault):
        load("tiny")


def test_a_bare_npy_is_no_npz(tiny: Dataset, tmp_path: Path) -> None:
    with open(tmp_path / "own" / "tiny.npz", "wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataCorrupt, match="not a sound npz file"):
        load("tiny")


# --- what there is ------------------------------------------------------------------------------


def test_available_lists_tiers_and_marks_what_load_takes(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(**options: Any) -> list[tuple[str, str, bool]]:
        return [(r.tier, r.state, r.chosen) for r in data.available(**options)]

    absent = [("real", "missing", False), ("package", "missing", False)]
    assert states() == [*absent, ("embedded", "found", True)]
    row = data.available()[1]
    assert (row.id, row.name, row.train, row.test) == ("tiny", "Tiny", 6, 4)
    assert (row.licence, row.size, row.get, row.location) == ("CC0", "1 kB", "install tiny", None)
    folder = _write(tiny, tmp_path / "own" / "package")
    assert states(verify=True)[1:] == [("package", "found", True), ("embedded", "found", False)]
    (folder / FILES[0]).write_bytes(b"")
    assert states()[1] == ("package", "found", True)  # not verified
    assert states(verify=True)[1:] == [
        ("package", "corrupt", False),
        ("embedded", "found", False),  # load("tiny") raises
    ]
    assert data.available(verify=True)[1].get == "reinstall tiny"
    (folder / FILES[0]).unlink()
    assert "missing: train-images" in data.available()[1].note
    monkeypatch.setenv("PROOFREAD_DATA", "typo")
    assert "typo, which is no folder" in data.available()[0].note


def test_available_on_the_true_registry() -> None:
    rows = {(r.id, r.tier): r for r in data.available(verify=True)}
    assert rows["fashion_mnist", "embedded"].state == "found"
    assert rows["digits", "package"].state == "found"
    assert rows["fashion_mnist", "real"].state == "missing"
    assert all(r.licence and r.size and r.get for r in rows.values())


# --- the registry -------------------------------------------------------------------------------


def test_only_permissive_sets_are_committed() -> None:
    for entry in data.registry().values():
        assert entry.may_commit or "embedded" not in entry.tiers
    committed = {f.name for f in data._own_folder().iterdir()} - {"registry.toml", "README.md"}
    assert committed == {
        e.tiers["embedded"].file for e in data.registry().values() if "embedded" in e.tiers
    }
    assert "Copyright © 2017 Zalando SE" in (data._own_folder() / "README.md").read_text()


def test_registry_has_the_published_hashes() -> None:
    tiers = data.registry()["fashion_mnist"].tiers
    assert tiers["package"].sha256 == tiers["real"].sha256 == PUBLISHED


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('licence = "CC0"', "", r'\[tiny\] lacks "licence"'),
        ('licence = "CC0"', 'license = "CC0"\nlicence = "CC0"', 'key "license", did you mean'),
        ('licence = "CC0"', 'licence = ""', r"\[tiny\] licence must be a non-empty string"),
        ("may_commit = true", 'may_commit = "yes"', "may_commit must be of type bool"),
        ("scale = 2", "scale = true", "scale must be of type int, not True"),
        ("whole = [6, 4]", "whole = [6]", r"whole must be \[train, test\]"),
        ('classes = ["a", "b"]', "classes = []", "classes must be a non-empty list of str"),
        ('format = "idx"', 'format = "hdf5"', r"\[tiny.real\] format must be one of idx, npz, csv"),
        ('like = "package"', 'like = "pakage"', r"\[tiny.real\] like must name another tier"),
        ('like = "package"', 'like = "real"', "which has no like"),
        ('file = "tiny.npz"', "", r'\[tiny.embedded\] lacks "file"'),
        ("train = 4", "train = 3", r"\[tiny.embedded\] train must be the same a class"),
        ("train = 6", "train = 0", "train must be positive, not 0"),
        ('"x_train" = "', '"x_train" = "z', "x_train must be 64 hexadecimal digits"),
        ('"y_test" = ', '"t_test" = ', "sha256 must have the keys x_train"),
        (f'"{FILES[3]}" = ', f'"{"0" * 64}" = "{"0" * 64}"\n"x" = ', r"must name 4 file\(s\)"),
        ("[tiny]", "[tiny", "registry .*registry.toml: .*line 2"),
        ("[tiny]", "stray = 1\n[tiny]", "stray must be a table"),
    ],
)
def test_registry_errors_name_file_table_and_key(
    tiny: Dataset, tmp_path: Path, old: str, new: str, match: str
) -> None:
    file = tmp_path / "own" / "registry.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(RegistryError, match=match) as caught:
        data.registry()
    assert str(file) in str(caught.value)


def test_registry_that_is_not_there_or_has_no_tier(tmp_path: Path, tiny: Dataset) -> None:
    with pytest.raises(RegistryError, match="No such file"):
        data.registry(tmp_path / "none.toml")
    head = (tmp_path / "own" / "registry.toml").read_text().split("[tiny.real]")[0]
    (tmp_path / "bare.toml").write_text(head)
    with pytest.raises(RegistryError, match=r"\[tiny\] has no tier; give one of real"):
        data.registry(tmp_path / "bare.toml")
    (tmp_path / "bare.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RegistryError, match="codec"):
        data.registry(tmp_path / "bare.toml")


# --- generators ---------------------------------------------------------------------------------


def _q(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


@pytest.mark.parametrize("snr", [0.0, 0.3, 1.5, 4.0, 12.0])
def test_bayes_error_closed_forms(snr: float) -> None:
    two = GaussianMixture(n_classes=2, dim=1, radius=3 * snr, sigma=3.0)
    assert two.bayes_error() == pytest.approx(_q(snr), rel=1e-9)
    q = _q(snr / math.sqrt(2))  # four phases: two independent bits
    four = GaussianMixture(n_classes=4, dim=5, radius=snr)
    assert four.bayes_error() == pytest.approx(2 * q - q * q, rel=1e-9)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_bayes_error_without_signal_is_chance(k: int) -> None:
    assert GaussianMixture(n_classes=k, radius=0).bayes_error() == pytest.approx(1 - 1 / k)


@pytest.mark.parametrize(("k", "dim"), [(2, 1), (2, 3), (3, 2), (5, 4)])
def test_bayes_error_is_the_mean_of_the_posterior_gap_and_the_error_rate(k: int, dim: int) -> None:
    n = 40_000
    mixture = GaussianMixture(n_classes=k, dim=dim, radius=1.2, sigma=0.8)
    x, y = mixture.sample(n, seed=1)
    posterior = mixture.posterior(x)
    margin = 5 * 0.5 / math.sqrt(n)  # five standard errors of a variable in [0, 1]
    assert abs((1 - posterior.max(axis=1)).mean() - mixture.bayes_error()) < margin
    assert abs((posterior.argmax(axis=1) != y).mean() - mixture.bayes_error()) < margin
    # any other rule does worse, by more than the noise
    assert (posterior.argmin(axis=1) != y).mean() > mixture.bayes_error() + margin


def test_posterior_is_bayes_rule_on_the_densities() -> None:
    from scipy.stats import multivariate_normal

    mixture = GaussianMixture(n_classes=3, dim=4, radius=2.0, sigma=0.7)
    x, _ = mixture.sample(50, seed=3)
    density = np.stack(
        [multivariate_normal(m, 0.7**2 * np.eye(4)).pdf(x) for m in mixture.means], axis=1
    )
    naive = density / density.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mixture.posterior(x), naive, rtol=1e-9, atol=1e-300)
    far = mixture.posterior(np.full((1, 4), 1e4))
    assert np.isfinite(far).all()


def test_generated_data_set_is_pinned_balanced_and_independent() -> None:
    mixture = GaussianMixture(n_classes=3, dim=2)
    d = mixture.dataset(302, 99, seed=0)
    assert sorted(np.bincount(d.y_train)) == [100, 101, 101]
    assert d.label.startswith("Gaussian mixture (K = 3, d = 2, radius 1.5, σ 1, seed 0), generated")
    assert (d.is_subset, d.stands_in_for) == (False, None)
    again, longer = mixture.dataset(302, 99, seed=0), mixture.dataset(50, 99, seed=0)
    assert again.sha256 == d.sha256
    assert longer.part_sha256["x_test"] == d.part_sha256["x_test"]
    assert mixture.dataset(302, 99, seed=1).sha256 != d.sha256
    assert not np.intersect1d(d.x_train, d.x_test[:, :1]).size > 20  # splits share no stream
    np.testing.assert_array_equal(d.arrays().x_train, d.x_train.astype(np.float32))  # unscaled
    assert d.sha256[:16] == "6f9a96ea9ef2b4a6"  # the same bytes on every machine and version


def test_tiny_scales_are_not_rounded_away() -> None:
    big, small = (GaussianMixture(radius=r, sigma=s) for r, s in ((1.5, 1.0), (1.5e-9, 1e-9)))
    np.testing.assert_allclose(big.sample(9, seed=2)[0], small.sample(9, seed=2)[0] * 1e9)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"n_classes": 1}, "n_classes must be an integer ≥ 2, not 1"),
        ({"n_classes": 2.0}, "n_classes must be an integer"),
        ({"n_classes": 3, "dim": 1}, "dim must be an integer ≥ 2, not 1"),
        ({"dim": 0}, "dim must be an integer ≥ 1"),
        ({"radius": -1.0}, "radius must be finite and ≥ 0"),
        ({"radius": math.nan}, "radius must be finite"),
        ({"sigma": 0.0}, "sigma must be finite and > 0"),
        ({"sigma": math.inf}, "sigma must be finite"),
    ],
)
def test_bad_mixtures(parameters: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GaussianMixture(**parameters)


def test_bad_samples_and_points() -> None:
    mixture = GaussianMixture()
    with pytest.raises(ValueError, match="n must be an integer ≥ 1, not 0"):
        mixture.sample(0, seed=0)
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, not -1"):
        mixture.dataset(2, 2, seed=-1)
    with pytest.raises(ValueError, match=r"x must be \[N, 2\], not \[3\]"):
        mixture.posterior(np.zeros(3))
