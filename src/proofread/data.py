"""Data sets that say what they are: tier, size and content hash travel with every array.

Three tiers, never mixed up and never swapped silently:

``embedded``
    a small part that ships with the package, so that everything runs with nothing installed;
``package``
    what a package manager put on this disk (Debian, pip);
``real``
    a folder of the user's: ``path=``, ``$PROOFREAD_DATA/<id>`` or a torchvision root.

``load("fashion_mnist")`` takes the best tier present, in the order real, package, embedded. A
notebook whose numbers are compared across machines names its tier: ``tier="embedded"``. A file
that is there but damaged is an error in every mode. Nothing here downloads anything.

``GaussianMixture`` makes data whose posterior and Bayes error are known exactly.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import math
import os
import re
import stat
import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = [
    "Arrays",
    "DataCorrupt",
    "DataNotFound",
    "Dataset",
    "Entry",
    "Found",
    "GaussianMixture",
    "RegistryError",
    "Tier",
    "available",
    "load",
    "registry",
]

PARTS = ("x_train", "y_train", "x_test", "y_test")
_TIERS = ("real", "package", "embedded")  # the order in which "auto" looks
_WANTED = {"auto": _TIERS, "full": _TIERS[:2]} | {tier: (tier,) for tier in _TIERS}
_IDX_CODES = {"uint8": 0x08, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


class DataNotFound(FileNotFoundError):
    """The wanted tier of a data set is not on this machine; the message says how to get it."""


class DataCorrupt(ValueError):
    """A file of a data set is there, but is not what it should be; never worked around."""


class RegistryError(ValueError):
    """The registry of data sets breaks its own rules; the message names file and table."""


# --- the data set -------------------------------------------------------------------------------


class Arrays(NamedTuple):
    """Features and labels ready for a model (numpy arrays or torch tensors)."""

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled training and test set, with its provenance. The arrays are read-only.

    Attributes:
        id: its name in the registry, or the generator's name.
        name: its name in print.
        tier: ``embedded``, ``package``, ``real`` or ``generated``.
        x_train: ``[N, ...]``; images are uint8, generated features float64.
        y_train: ``[N]``, int64 in ``0 … n_classes - 1``.
        x_test: like ``x_train``, with a number of items of its own.
        y_test: like ``y_train``.
        class_names: one name a class.
        licence: short licence text.
        source: where the bytes come from, in words (no path of this machine).
        scale: the largest value a raw feature can take; None leaves features as they are.
        selection: which items were taken, in words; empty when all were.
        whole: items in (train, test) of the full set, None for a generator.
        location: the folder the files were read from, None for a generator.

    Raises:
        ValueError: shapes, lengths or labels that do not fit together.
        TypeError: a dtype other than those above.
    """

    id: str
    name: str
    tier: str
    x_train: NDArray[Any] = field(repr=False)
    y_train: NDArray[np.int64] = field(repr=False)
    x_test: NDArray[Any] = field(repr=False)
    y_test: NDArray[np.int64] = field(repr=False)
    class_names: tuple[str, ...]
    licence: str
    source: str
    scale: float | None = None
    selection: str = ""
    whole: tuple[int, int] | None = None
    location: Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for part in PARTS:
            array = np.asarray(getattr(self, part)).view()
            array.flags.writeable = False  # a change in place would make the hash a lie
            object.__setattr__(self, part, array)
        for split in ("train", "test"):
            _check_split(self, split)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"{self.id}: items have shape {self.x_train.shape[1:]} in x_train "
                f"and {self.x_test.shape[1:]} in x_test"
            )

    def __repr__(self) -> str:
        return f"<{self.label}>"

    @property
    def n_train(self) -> int:
        """Number of training items."""
        return len(self.y_train)

    @property
    def n_test(self) -> int:
        """Number of test items."""
        return len(self.y_test)

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def is_subset(self) -> bool:
        """Whether this is less than the whole set."""
        return self.whole is not None and self.whole != (self.n_train, self.n_test)

    @property
    def stands_in_for(self) -> str | None:
        """What a subset stands in for, ready for a caption; None for a whole set."""
        if self.whole is None or not self.is_subset:
            return None
        return f"the whole of {self.name} ({_count(*self.whole)})"

    @cached_property
    def part_sha256(self) -> dict[str, str]:
        """The sha256 of each array's idx encoding (header and big-endian content).

        For the whole Fashion-MNIST these are the hashes of the four published files, unzipped.
        """
        return {part: _array_sha256(getattr(self, part)) for part in PARTS}

    @cached_property
    def sha256(self) -> str:
        """The sha256 of the four lines ``<part_sha256>  <part>``, as ``sha256sum`` prints them."""
        lines = "".join(f"{value}  {part}\n" for part, value in self.part_sha256.items())
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def label(self) -> str:
        """Name, tier, size and the start of the hash, as every figure and table shows them."""
        subset = " subset" if self.is_subset else ""
        size = _count(self.n_train, self.n_test)
        return f"{self.name}{subset}, {self.tier} tier, {size}, sha256 {self.sha256[:8]}"

    def take(self, train: int | None = None, test: int | None = None) -> Dataset:
        """The first items of each class, equally many of each, in the order they had.

        Args:
            train: how many training items; a multiple of ``n_classes``; None keeps all.
            test: how many test items, likewise.

        Raises:
            ValueError: a number that is not such a multiple, or more than a class holds.
        """
        wanted = {"train": train, "test": test}
        parts: dict[str, Any] = {}
        for split, n in ((s, n) for s, n in wanted.items() if n is not None):
            rows = self._first_rows(split, n)
            parts[f"x_{split}"] = getattr(self, f"x_{split}")[rows]
            parts[f"y_{split}"] = getattr(self, f"y_{split}")[rows]
        if not parts:
            return self
        k = self.n_classes
        each = " / ".join(f"{n // k:,} {split}" for split, n in wanted.items() if n is not None)
        return replace(self, **parts, selection=f"first {each} of each class, in file order")

    def _first_rows(self, split: str, n: int) -> NDArray[np.intp]:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1 or n % self.n_classes:
            raise ValueError(f"{split}={n!r} must be a positive multiple of {self.n_classes}")
        labels = getattr(self, f"y_{split}")
        least = int(np.bincount(labels, minlength=self.n_classes).min())
        if n // self.n_classes > least:
            raise ValueError(
                f"{split}={n} asks for {n // self.n_classes} items of each class, but the "
                f"smallest has {least}; at most {split}={least * self.n_classes} is possible"
            )
        return _first_of_each_class(labels, n // self.n_classes)

    def arrays(self, *, flat: bool = True) -> Arrays:
        """Features scaled to [0, 1] as float32, ``[N, d]`` if ``flat`` else ``[N, ...]``; labels.

        Generated features have no range and keep their values. The arrays are fresh and writable.
        """
        x = [self._scaled(a, flat) for a in (self.x_train, self.x_test)]
        return Arrays(x[0], self.y_train.copy(), x[1], self.y_test.copy())

    def tensors(self, *, flat: bool = True, device: torch.device | str | None = None) -> Arrays:
        """The same as ``arrays`` in torch tensors (float32 and int64) on ``device``."""
        import torch

        parts = [torch.from_numpy(a) for a in self.arrays(flat=flat)]
        return Arrays(*(p if device is None else p.to(device) for p in parts))

    def _scaled(self, x: NDArray[Any], flat: bool) -> NDArray[np.float32]:
        out = x.astype(np.float32)
        if self.scale is not None:
            out /= np.float32(self.scale)
        return out.reshape(len(out), -1) if flat else out

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the four arrays as a compressed npz; equal content gives equal bytes.

        Labels become uint8. This is how the embedded tier was made:
        ``load("fashion_mnist", tier="full").take(5000, 1000).save(...)``.

        Raises:
            ValueError: ``path`` does not end in ``.npz``.
        """
        target = Path(path).expanduser()
        if target.suffix != ".npz":
            raise ValueError(f"path must end in .npz, not {target.name!r}")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for part in PARTS:
                buffer = io.BytesIO()
                np.save(buffer, _storable(getattr(self, part)), allow_pickle=False)
                # a ZipInfo made by hand carries the date 1980-01-01, not today's
                archive.writestr(_zip_entry(f"{part}.npy"), buffer.getvalue(), compresslevel=9)
        return target


def _zip_entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _count(train: int, test: int) -> str:
    return f"{train:,} train / {test:,} test"


def _check_split(data: Dataset, split: str) -> None:
    x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
    if x.dtype.name not in ("uint8", "float32", "float64"):
        raise TypeError(f"{data.id}: x_{split} must be uint8, float32 or float64, not {x.dtype}")
    if y.dtype != np.int64:
        raise TypeError(f"{data.id}: y_{split} must be int64, not {y.dtype}")
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or not len(y):
        raise ValueError(
            f"{data.id}: x_{split} must be [N, ...] and y_{split} [N] with N ≥ 1, "
            f"not {list(x.shape)} and {list(y.shape)}"
        )
    if y.min() < 0 or y.max() >= data.n_classes:
        raise ValueError(
            f"{data.id}: y_{split} holds labels {y.min()} … {y.max()}, "
            f"but there are {data.n_classes} classes"
        )


def _storable(array: NDArray[Any]) -> NDArray[Any]:
    """Labels in the smallest type that idx files know; features as they are."""
    if array.dtype != np.int64:
        return array
    return array.astype(np.uint8 if array.max() < 256 else np.int32)


def _array_sha256(array: NDArray[Any]) -> str:
    """Hash of the array as an idx file: 0, 0, type, rank, sizes, then big-endian content."""
    array = _storable(array)
    header = bytes([0, 0, _IDX_CODES[array.dtype.name], array.ndim])
    sizes = np.array(array.shape, ">i4").tobytes()
    content = np.ascontiguousarray(array, array.dtype.newbyteorder(">"))
    digest = hashlib.sha256(header + sizes)
    digest.update(content.data if content.size else b"")
    return digest.hexdigest()


def _first_of_each_class(labels: NDArray[Any], n: int, skip: int = 0) -> NDArray[np.intp]:
    """Ascending rows of the items number ``skip … skip + n - 1`` of each class."""
    rows = [np.flatnonzero(labels == c)[skip : skip + n] for c in np.unique(labels)]
    return np.sort(np.concatenate(rows))


# --- the registry -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tier:
    """One way to have a data set; see the head of ``datasets/registry.toml`` for the fields."""

    name: str
    format: str
    source: str
    size: str
    get: str
    train: int
    test: int
    folders: tuple[str, ...]
    sha256: Mapping[str, str]
    shared: tuple[str, ...] = ()
    file: str = ""
    selection: str = ""
    repair: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that must be there, without ``.gz``."""
        return (self.file,) if self.file else tuple(self.sha256)


@dataclass(frozen=True)
class Entry:
    """A data set of the registry: its facts and its tiers, in the order real, package, embedded."""

    id: str
    name: str
    licence: str
    may_commit: bool
    homepage: str
    shape: tuple[int, ...]
    scale: float
    whole: tuple[int, int]
    classes: tuple[str, ...]
    tiers: Mapping[str, Tier]


_TEXTS, _NUMBERS = (list, str), (list, int)  # a list of strings, of numbers
_ENTRY_KEYS: dict[str, Any] = {
    **dict.fromkeys(("name", "licence", "homepage"), str),
    "may_commit": bool,
    "shape": _NUMBERS,
    "scale": int,
    "whole": _NUMBERS,
    "classes": _TEXTS,
}
_TIER_KEYS: dict[str, Any] = {
    **dict.fromkeys(("format", "source", "size", "get"), str),
    **dict.fromkeys(("train", "test"), int),
    "folders": _TEXTS,
    "sha256": dict,
}
_TIER_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("file", "selection", "repair"), str),
    "shared": _TEXTS,
}


def registry(path: str | os.PathLike[str] | None = None) -> dict[str, Entry]:
    """All data sets that ``load`` knows, by id.

    Args:
        path: another registry file; None takes the one that ships with the package.

    Raises:
        RegistryError: a file that cannot be read or that breaks the rules at its head.
    """
    file = _own_folder() / "registry.toml" if path is None else Path(path)
    try:
        with open(file, "rb") as stream:
            tables = tomllib.load(stream)
        return {name: _entry(name, table) for name, table in tables.items()}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, _Fault) as fault:
        raise RegistryError(f"registry {file}: {fault}") from None


class _Fault(Exception):
    """A broken rule of the registry, before the file's name is known."""


def _entry(name: str, table: Any) -> Entry:
    _demand(isinstance(table, dict), f"{name} must be a table [{name}]")
    raw = {tier: table[tier] for tier in _TIERS if tier in table}
    facts = {key: value for key, value in table.items() if key not in _TIERS}
    _check_keys(f"[{name}]", facts, _ENTRY_KEYS, {})
    _demand(bool(raw), f"[{name}] has no tier; give one of {', '.join(_TIERS)}")
    _demand(len(facts["whole"]) == 2, f"[{name}] whole must be [train, test]")
    tiers = {t: _tier(f"[{name}.{t}]", t, raw, len(facts["classes"])) for t in raw}
    return Entry(id=name, tiers=tiers, **_frozen(facts))


def _tier(where: str, name: str, tables: Mapping[str, Any], n_classes: int) -> Tier:
    table = tables[name]
    _demand(isinstance(table, dict), f"{where} must be a table")
    table = dict(table)
    if "like" in table:
        model = tables.get(str(table.pop("like")))
        if not isinstance(model, dict) or "like" in model:
            raise _Fault(f"{where} like must name another tier of this set, which has no like")
        table = {**model, **table}
    _check_keys(where, table, _TIER_KEYS, _TIER_OPTIONS)
    _demand(table["format"] in _READERS, f"{where} format must be one of {', '.join(_READERS)}")
    for split in ("train", "test"):
        _demand(table[split] > 0, f"{where} {split} must be positive, not {table[split]}")
        if table.get("selection"):
            _demand(table[split] % n_classes == 0, f"{where} {split} must be the same a class")
    _check_hashes(where, table)
    return Tier(name=name, **_frozen(table))


def _check_hashes(where: str, table: Mapping[str, Any]) -> None:
    for file, value in table["sha256"].items():
        good = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
        _demand(bool(good), f"{where} sha256 of {file} must be 64 hexadecimal digits")
    keys = list(table["sha256"])
    if table["format"] == "npz":
        _demand(keys == list(PARTS), f"{where} sha256 must have the keys {', '.join(PARTS)}")
        _demand(bool(table.get("file")), f'{where} lacks "file", which the format npz needs')
    else:
        n = {"idx": 4, "csv": 1}[table["format"]]
        _demand(len(keys) == n, f"{where} sha256 must name {n} file(s), not {len(keys)}")


def _check_keys(
    where: str, table: Mapping[str, Any], needed: Mapping[str, Any], optional: Mapping[str, Any]
) -> None:
    for key in needed:
        _demand(key in table, f'{where} lacks "{key}"')
    for key, value in table.items():
        rule = needed.get(key, optional.get(key))
        hint = difflib.get_close_matches(key, [*needed, *optional], 1)
        hint_text = f', did you mean "{hint[0]}"?' if hint else ""
        _demand(rule is not None, f'{where} has the unknown key "{key}"{hint_text}')
        _demand(_is(value, rule), f"{where} {key} must be {_said(rule)}, not {value!r}")


def _is(value: Any, rule: Any) -> bool:
    if isinstance(rule, tuple):
        return isinstance(value, list) and bool(value) and all(_is(v, rule[1]) for v in value)
    return type(value) is rule and value != ""  # `type`, for a bool is an int


def _said(rule: Any) -> str:
    if isinstance(rule, tuple):
        return f"a non-empty list of {rule[1].__name__}"
    return {str: "a non-empty string", dict: "a table"}.get(rule, f"of type {rule.__name__}")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Fault(otherwise)


def _frozen(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


def _own_folder() -> Path:
    return Path(str(resources.files("proofread") / "datasets"))


# --- where to look ------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A root with the folders below it that may hold the files."""

    root: Path | str  # a str says why there is no such folder
    below: tuple[str, ...] = (".",)
    usual: bool = False  # a customary root that nobody asked for: skipped when unreadable

    def folders(self) -> Iterator[Path]:
        if isinstance(self.root, Path):
            yield from (self.root / sub for sub in self.below)

    def __str__(self) -> str:
        if isinstance(self.root, str):
            return self.root
        below = "" if self.below == (".",) else f"/{{{','.join(self.below)}}}"
        return f"{self.root}{below}"


def _places(entry: Entry, tier: Tier, path: Path | None) -> list[_Place]:
    if tier.name != "real":
        return [_Place(_installed(folder)) for folder in tier.folders]
    if path is not None:
        return [_Place(path, tier.folders)]
    roots = [_Place(root, tier.shared, usual=True) for root in _torchvision_roots()]
    variable = os.environ.get("PROOFREAD_DATA")
    if not variable:
        return [_Place(f"$PROOFREAD_DATA/{entry.id} (PROOFREAD_DATA is not set)"), *roots]
    mine = Path(variable).expanduser()
    return [_Place(mine / entry.id, tier.folders), _Place(mine, tier.shared), *roots]


def _installed(folder: str) -> Path | str:
    """``/a/folder``, or ``module:sub`` below an installed package, which is not imported."""
    if ":" not in folder:
        return Path(folder)
    module, sub = folder.split(":", 1)
    if module == "proofread":
        return Path(str(resources.files("proofread") / sub))
    spec = util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return f"Python package {module} (not installed)"
    return Path(spec.submodule_search_locations[0]) / sub


def _torchvision_roots() -> list[Path]:
    """The roots that tutorials pass to torchvision, then its own default below torch's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("TORCH_HOME") or f"{cache}/torch").expanduser()
    data = [Path("data"), Path("../data"), Path("~/data").expanduser()]
    return [*data, home / "datasets", home / "datasets/vision"]


def _find(entry: Entry, tier: Tier, path: Path | None) -> tuple[Path | None, list[str]]:
    """The first folder that holds the tier's files (None: absent), and what was searched."""
    if path is None and tier.name == "real":
        _check_variable(entry, tier)
    places = _places(entry, tier, path)
    for place in places:
        for folder in place.folders():
            if _holds(entry, tier, folder, place.usual):
                return folder, []
    return None, [str(place) for place in places]


def _check_variable(entry: Entry, tier: Tier) -> None:
    root = os.environ.get("PROOFREAD_DATA")
    if root and not Path(root).expanduser().is_dir():
        fault = f"PROOFREAD_DATA is set to {root}, which is no folder"
        raise DataNotFound(_not_found(entry, tier, fault, [root]))


def _holds(entry: Entry, tier: Tier, folder: Path, usual: bool) -> bool:
    """Whether all files of the tier are in ``folder``; only some of them is an error."""
    try:
        missing = [name for name in tier.files if _present(folder, name) is None]
    except OSError as error:
        if usual:
            return False  # $HOME is somebody else's, say
        raise _corrupt(entry, tier, folder, f"cannot be looked into: {error.strerror}") from None
    if missing and len(missing) < len(tier.files):
        fault = f"holds a part of the set only; missing: {', '.join(missing)}"
        raise _corrupt(entry, tier, folder, fault)
    return not missing


def _present(folder: Path, name: str) -> Path | None:
    """The file as it is or with ``.gz``. A broken link counts as present, to be complained of."""
    for file in (folder / name, folder / f"{name}.gz"):
        try:
            os.lstat(file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return file
    return None


# --- reading ------------------------------------------------------------------------------------


def _read_file(entry: Entry, tier: Tier, folder: Path, name: str) -> bytes:
    """The file's decompressed content, checked against its hash."""
    file = _present(folder, name) or folder / name
    try:
        _check_regular(file)
        with open(file, "rb") as stream:
            content = stream.read()
        if content[:2] == b"\x1f\x8b":  # by content: browsers unzip and keep the name
            content = gzip.decompress(content)
    except EOFError:
        raise _corrupt(entry, tier, file, "the gzip stream ends early: truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _corrupt(entry, tier, file, f"the gzip stream is damaged: {error}") from None
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
        raise _corrupt(entry, tier, file, fault) from None
    found = hashlib.sha256(content).hexdigest()
    if found != tier.sha256[name]:
        fault = _content_fault(tier, content)
        raise _corrupt(entry, tier, file, fault, (tier.sha256[name], found))
    return content


def _check_regular(file: Path) -> None:
    if not stat.S_ISREG(os.stat(file).st_mode):  # a folder, or a pipe that would block for ever
        raise OSError("it is not a regular file")


def _content_fault(tier: Tier, content: bytes) -> str:
    if not content:
        return "it is empty"
    if tier.format != "idx":
        return "its content is not what it should be"
    if content[:3] != b"\0\0\x08" or len(content) < 4 or len(content) < 4 + 4 * content[3]:
        return "it is not an idx file of bytes (wrong magic number)"
    sizes = np.frombuffer(content, ">u4", content[3], 4)
    length = 4 + 4 * content[3] + math.prod(int(n) for n in sizes)
    if length != len(content):
        return f"it has {len(content):,} bytes where its header promises {length:,}"
    return "an idx file with other content (MNIST's files have the same names)"


def _read_idx(entry: Entry, tier: Tier, folder: Path) -> list[NDArray[Any]]:
    return [_from_idx(_read_file(entry, tier, folder, name)) for name in tier.files]


def _from_idx(content: bytes) -> NDArray[np.uint8]:
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _read_csv(entry: Entry, tier: Tier, folder: Path) -> list[NDArray[Any]]:
    """Rows of pixels and a label, split class by class in file order."""
    content = _read_file(entry, tier, folder, tier.files[0])
    table = np.loadtxt(io.BytesIO(content), dtype=np.uint8, delimiter=",")  # [N, d + 1]
    labels, n_classes = table[:, -1], len(entry.classes)
    n_train, n_test = tier.train // n_classes, tier.test // n_classes
    rows = _first_of_each_class(labels, n_train), _first_of_each_class(labels, n_test, n_train)
    images = table[:, :-1].reshape(-1, *entry.shape)
    return [array[r] for r in rows for array in (images, labels)]


def _read_npz(entry: Entry, tier: Tier, folder: Path) -> list[NDArray[Any]]:
    file = folder / tier.file
    try:
        _check_regular(file)
        with np.load(file, allow_pickle=False) as archive:
            arrays = [archive[part] for part in PARTS]
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
        raise _corrupt(entry, tier, file, fault) from None
    except (ValueError, LookupError, EOFError, TypeError, AttributeError, NotImplementedError,
            zlib.error, zipfile.BadZipFile) as error:  # fmt: skip
        raise _corrupt(entry, tier, file, f"it is not a sound npz file: {error}") from None
    for part, array in zip(PARTS, arrays, strict=True):
        found = _array_sha256(array) if array.dtype == np.uint8 else f"dtype {array.dtype}"
        if found != tier.sha256[part]:
            fault = f"its array {part} is not what it should be"
            raise _corrupt(entry, tier, file, fault, (tier.sha256[part], found))
    return arrays


_READERS = {"idx": _read_idx, "npz": _read_npz, "csv": _read_csv}


def _read(entry: Entry, tier: Tier, folder: Path) -> Dataset:
    x_train, y_train, x_test, y_test = _READERS[tier.format](entry, tier, folder)
    return Dataset(
        id=entry.id,
        name=entry.name,
        tier=tier.name,
        x_train=x_train,
        y_train=y_train.astype(np.int64),
        x_test=x_test,
        y_test=y_test.astype(np.int64),
        class_names=entry.classes,
        licence=entry.licence,
        source=tier.source,
        scale=entry.scale,
        selection=tier.selection,
        whole=entry.whole,
        location=Path(os.path.abspath(folder)),
    )


# --- what people see when it fails --------------------------------------------------------------


def _lines(head: str, facts: Mapping[str, str | Sequence[str]]) -> str:
    rows = [head]
    for key, value in facts.items():
        first, *rest = [value] if isinstance(value, str) else list(value)
        rows += [f"  {key + ':':<10}{first}", *(f"{'':12}{line}" for line in rest)]
    return "\n".join(rows)


def _not_found(entry: Entry, tier: Tier, head: str, searched: Sequence[str]) -> str:
    facts: dict[str, str | Sequence[str]] = {
        "searched": searched,
        "get it": tier.get,
        "licence": entry.licence,
        "size": f"{tier.size}, {_count(tier.train, tier.test)}",
    }
    return _lines(f"{entry.name}: {head}", facts | _instead(entry, tier))


def _corrupt(
    entry: Entry, tier: Tier, file: Path, fault: str, hashes: tuple[str, str] | None = None
) -> DataCorrupt:
    facts: dict[str, str] = {"file": os.path.abspath(file), "fault": fault}
    if hashes:
        facts["expected"] = f"{hashes[0]} (sha256 of the decompressed content)"
        facts["found"] = hashes[1]
    elif file.name.removesuffix(".gz") in tier.sha256:
        expected = tier.sha256[file.name.removesuffix(".gz")]
        facts["expected"] = f"{expected} (sha256 of the decompressed content)"
        facts["found"] = "no content to hash"
    facts["remedy"] = tier.repair if tier.name != "real" else f"remove it, then: {tier.get}"
    head = f"{entry.name}, {tier.name} tier: a file is there but not usable"
    return DataCorrupt(_lines(head, facts | _instead(entry, tier)))


def _instead(entry: Entry, tier: Tier) -> dict[str, str]:
    """The alternative that needs nothing, unless it is the one that failed."""
    small = entry.tiers.get("embedded")
    if small is None or small.name == tier.name:
        return {}
    call = f'load("{entry.id}", tier="embedded")'
    return {"instead": f"{call}, {_count(small.train, small.test)}, needs nothing"}


# --- load and list ------------------------------------------------------------------------------


def load(id: str, *, tier: str = "auto", path: str | os.PathLike[str] | None = None) -> Dataset:
    """Read a data set and check every byte of it against the registry's hash.

    Args:
        id: ``fashion_mnist`` or ``digits``; ``registry()`` lists them.
        tier: ``embedded``, ``package`` or ``real`` for exactly that one; ``full`` for real or
            package, whichever is found first; ``auto`` for the first of real, package, embedded.
        path: a folder that holds the files (or a torchvision root): the real tier, and nothing
            else is searched.

    Returns:
        The data set; its ``tier`` and ``label`` say what was found.

    Raises:
        DataNotFound: the tier is not on this machine. With ``auto`` this happens only where a set
            has no embedded tier, or where ``path`` or ``PROOFREAD_DATA`` names no folder.
        DataCorrupt: a file is present but damaged, incomplete, unreadable or not the right one.
        ValueError: unknown ``id`` or ``tier``, or a ``path`` that the tier cannot use.
    """
    entry = _known(id)
    folder = None if path is None else _user_folder(path)
    wanted = _wanted(entry, tier, folder)
    searched: list[str] = []
    for name in wanted:
        found, looked = _find(entry, entry.tiers[name], folder)
        if found is not None:
            return _read(entry, entry.tiers[name], found)
        searched += looked
    easiest = entry.tiers[wanted[-1]]
    raise DataNotFound(_not_found(entry, easiest, _absence(wanted, folder), searched))


def _absence(wanted: Sequence[str], path: Path | None) -> str:
    if path is None:
        return f"no {' or '.join(wanted)} tier on this machine"
    if path.is_dir():
        return f"path={path} does not hold its files"
    return f"path={path} {'is a file, not a folder' if path.exists() else 'does not exist'}"


def _user_folder(path: str | os.PathLike[str]) -> Path:
    if not os.fspath(path):  # would mean the working folder
        raise ValueError("path is empty; give a folder, or None to search the usual places")
    return Path(path).expanduser()


def _known(id: str) -> Entry:
    entries = registry()
    if id not in entries:
        near = difflib.get_close_matches(str(id), entries, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"id={id!r} is no data set; {hint}Known: {', '.join(entries)}")
    return entries[id]


def _wanted(entry: Entry, tier: str, path: Path | None) -> list[str]:
    if tier not in _WANTED:
        raise ValueError(f"tier={tier!r} must be one of {', '.join(_WANTED)}")
    names = [name for name in _WANTED[tier] if name in entry.tiers]
    if not names:
        has = ", ".join(entry.tiers)
        raise ValueError(f'{entry.name} has no tier that tier="{tier}" may use; it has: {has}')
    if path is None:
        return names
    if "real" not in names:
        raise ValueError(
            f"path= names a folder of the user's, the real tier, which "
            f'tier="{tier}" of {entry.name} does not use; leave one of the two out'
        )
    return ["real"]


@dataclass(frozen=True)
class Found:
    """One row of ``available()``: a tier of a data set and whether this machine has it.

    ``state`` is ``found``, ``missing`` or ``corrupt``; ``chosen`` marks the tier that
    ``load(id)`` would take; ``note`` says what is wrong; ``get`` is the command that mends it.
    """

    id: str
    name: str
    tier: str
    state: str
    chosen: bool
    train: int
    test: int
    licence: str
    size: str
    get: str
    location: Path | None
    note: str = ""


def available(*, verify: bool = False) -> list[Found]:
    """Every tier of every data set, whether found here, and how to get it.

    Args:
        verify: also read the files and check their hashes (about a second for full sets);
            without it a damaged file counts as found.
    """
    rows: list[Found] = []
    for entry in registry().values():
        free = True  # no better tier has been met
        for tier in entry.tiers.values():
            row = _row(entry, tier, verify)
            chosen = free and row.state == "found"
            free = free and row.state == "missing"  # a corrupt one stops load(id)
            rows.append(replace(row, chosen=chosen))
    return rows


def _row(entry: Entry, tier: Tier, verify: bool) -> Found:
    folder, note, state = None, "", "missing"
    try:
        folder, _ = _find(entry, tier, None)
        if folder is not None:
            state = "found"
            if verify:
                _read(entry, tier, folder)
    except DataCorrupt as error:
        state, note = "corrupt", str(error)
    except DataNotFound as error:
        note = str(error)
    return Found(
        id=entry.id,
        name=entry.name,
        tier=tier.name,
        state=state,
        chosen=False,
        train=tier.train,
        test=tier.test,
        licence=entry.licence,
        size=tier.size,
        get=tier.repair if state == "corrupt" and tier.repair else tier.get,
        location=folder,
        note=note,
    )


# --- generators ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianMixture:
    """``n_classes`` equally likely Gaussians on a circle, with exact posterior and Bayes error.

    Class k has mean ``radius · (cos 2πk/K, sin 2πk/K, 0, …)`` and covariance ``sigma² I`` in
    ``dim`` dimensions; in one dimension the two means are ``± radius``.

    Attributes:
        n_classes: K, at least 2.
        dim: d, at least 2; or 1 with two classes.
        radius: distance of the means from the origin, ≥ 0, in the unit of the features.
        sigma: standard deviation of each coordinate, > 0, in the same unit.

    Raises:
        ValueError: a parameter outside these ranges.
    """

    n_classes: int = 2
    dim: int = 2
    radius: float = 1.5
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _at_least("n_classes", self.n_classes, 2)
        _at_least("dim", self.dim, 1 if self.n_classes == 2 else 2)
        if not (math.isfinite(self.radius) and self.radius >= 0):
            raise ValueError(f"radius must be finite and ≥ 0, not {self.radius!r}")
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise ValueError(f"sigma must be finite and > 0, not {self.sigma!r}")

    @property
    def means(self) -> NDArray[np.float64]:
        """The means, ``[K, d]``."""
        angle = 2 * np.pi * np.arange(self.n_classes) / self.n_classes
        means = np.zeros((self.n_classes, self.dim))
        means[:, 0] = self.radius * np.cos(angle)
        if self.dim > 1:
            means[:, 1] = self.radius * np.sin(angle)
        return means

    def posterior(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """P(class | x) for points ``[N, d]``, by Bayes' rule: ``[N, K]``, rows sum to 1.

        Raises:
            ValueError: ``x`` is not ``[N, d]``.
        """
        x = np.asarray(x, dtype=np.float64)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"x must be [N, {self.dim}], not {list(x.shape)}")
        # all means have the same norm and all classes the same weight: both cancel
        logits = x @ self.means.T / self.sigma**2
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def bayes_error(self) -> float:
        """The least possible error rate.

        For two classes Q(radius / sigma); for K the symbol error of phase-shift keying as one
        smooth integral (Craig, MILCOM 1991), computed to a relative 1e-10.
        """
        from scipy import integrate, special

        snr = self.radius / self.sigma
        if self.n_classes == 2:
            return float(special.ndtr(-snr))
        rate = (snr * math.sin(math.pi / self.n_classes)) ** 2 / 2
        end = math.pi * (1 - 1 / self.n_classes)
        value, _ = integrate.quad(
            lambda angle: math.exp(-rate / math.sin(angle) ** 2), 0, end,
            points=[math.pi / 2], epsabs=0, epsrel=1e-10,
        )  # fmt: skip
        return value / math.pi

    def sample(self, n: int, *, seed: int, stream: int = 0) -> tuple[Any, Any]:
        """``n`` points ``[n, d]`` float64 and labels ``[n]`` int64, as even as n allows, shuffled.

        Equal arguments give equal bytes: the legacy generator's stream never changes, and
        coordinates are rounded to a multiple of 2⁻¹⁶ sigma, which hides the last digits in which
        mathematical libraries differ.

        Raises:
            ValueError: ``n < 1``, or a negative or fractional ``seed`` or ``stream``.
        """
        _at_least("n", n, 1)
        _at_least("seed", seed, 0)
        _at_least("stream", stream, 0)
        bits = np.random.MT19937(np.random.SeedSequence([seed, stream]))
        rng = np.random.RandomState(bits)
        labels = rng.permutation(np.arange(n, dtype=np.int64) % self.n_classes)
        x = self.means[labels] / self.sigma + rng.standard_normal((n, self.dim))
        return self.sigma * (np.round(x * 2**16) / 2**16), labels

    def dataset(self, n_train: int, n_test: int, *, seed: int) -> Dataset:
        """A generated ``Dataset``; the test set does not depend on ``n_train``."""
        x_train, y_train = self.sample(n_train, seed=seed, stream=0)
        x_test, y_test = self.sample(n_test, seed=seed, stream=1)
        parameters = f"K = {self.n_classes}, d = {self.dim}, radius {self.radius:g}"
        return Dataset(
            id="gaussian_mixture",
            name=f"Gaussian mixture ({parameters}, σ {self.sigma:g}, seed {seed})",
            tier="generated",
            x_train=x_train,
            y_train=y_train,
            x_test=x_test,
            y_test=y_test,
            class_names=tuple(str(k) for k in range(self.n_classes)),
            licence="none needed (generated)",
            source="proofread.data.GaussianMixture",
        )


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer ≥ {least}, not {value!r}")
