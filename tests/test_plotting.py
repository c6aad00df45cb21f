"""Figures: the palette by measurement, the digest on known data, the PNG byte by byte."""

from __future__ import annotations

import base64
import gc
import hashlib
import io
import itertools
import json
import os
import struct
import subprocess
import sys
import weakref

import matplotlib as mpl
import matplotlib.colors
import matplotlib.figure
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

from proofread import plotting
from proofread.plotting import COLOURS, LINE_COLOURS, FigureOutput, figure, show, style

NOTE = "Fashion-MNIST subset, embedded tier, 5,000 train / 1,000 test"

# Machado, Oliveira and Fernandes (2009), Table 1, severity 1.0; for linear RGB.
DEUTERANOPIA = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
)
PROTANOPIA = np.array(
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
)
SRGB_TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def labelled(**size: object) -> tuple[matplotlib.figure.Figure, object]:
    fig, ax = figure(**size)  # type: ignore[arg-type]
    ax.set(xlabel="epoch", ylabel="accuracy")
    return fig, ax


def shown(fig: matplotlib.figure.Figure, **options: str) -> list[str]:
    return show(fig, **options).digest.splitlines()


def chunks(png: bytes) -> list[bytes]:
    """The chunk names of a PNG, by its specification: length, name, content, checksum."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    names, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        names.append(png[at + 4 : at + 8])
        at += 12 + length
    return names


def pixels(output: FigureOutput) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(output.png)).convert("RGB"))  # [h, w, 3]


# The palette


def linear_rgb(colour: str) -> np.ndarray:
    c = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast_on_white(colour: str) -> float:
    """WCAG 2.1, contrast ratio with relative luminance."""
    return 1.05 / (float(linear_rgb(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05)


def lab(linear: np.ndarray) -> np.ndarray:
    t = SRGB_TO_XYZ @ linear.clip(0, 1) / [0.95047, 1, 1.08883]
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_line_colours_contrast_with_white() -> None:
    assert contrast_on_white("#767676") == pytest.approx(4.54, abs=0.005)  # a published value
    assert min(contrast_on_white(COLOURS[name]) for name in LINE_COLOURS) >= 3


def test_the_others_do_not_and_are_kept_from_lines() -> None:
    others = set(COLOURS) - set(LINE_COLOURS)
    assert others == {"orange", "sky", "yellow"}
    assert max(contrast_on_white(COLOURS[name]) for name in others) < 3


@pytest.mark.parametrize("vision", [np.eye(3), DEUTERANOPIA, PROTANOPIA])
def test_line_colours_differ_for_everyone(vision: np.ndarray) -> None:
    """CIE 1976 differences; 2.3 is just noticeable. Red and green would come to 14 at most."""
    seen = [lab(vision @ linear_rgb(COLOURS[name])) for name in LINE_COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


def test_lines_differ_in_dash_and_marker_too() -> None:
    _, ax = figure()
    lines = [ax.plot([0, 1])[0] for _ in range(10)]
    assert len({line.get_marker() for line in lines}) == 10
    assert len({str((line.get_color(), line._dash_pattern)) for line in lines}) == 10
    assert [line.get_color() for line in lines[:5]] == [COLOURS[name] for name in LINE_COLOURS]
    for a, b in itertools.pairwise(lines):
        assert (a.get_color(), a._dash_pattern) != (b.get_color(), b._dash_pattern)
        assert a.get_color() != b.get_color()


def test_palettes_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        COLOURS["blue"] = "#000000"  # type: ignore[index]


# Sizes


@pytest.mark.parametrize(
    ("width", "inches"), [("page", 6.5), ("half", 4.5), ("margin", 3.25), (5, 5)]
)
def test_widths(width: str | float, inches: float) -> None:
    fig, ax = labelled(width=width, height=2)
    ax.plot([1, 2])
    assert pixels(show(fig)).shape == (288, round(inches * 144), 3)


def test_axes_come_as_one_or_as_an_array() -> None:
    assert isinstance(figure()[1], mpl.axes.Axes)
    assert figure(ncols=3)[1].shape == (3,)
    assert figure(nrows=2)[1].shape == (2,)
    assert figure(nrows=2, ncols=3)[1].shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": "wide"}, "one of page, half, margin or inches, not 'wide'"),
        ({"width": 0}, "between 1 and 16 inches"),
        ({"width": float("nan")}, "between 1 and 16 inches"),
        ({"height": 0}, "between 0.5 and 40"),
        ({"height": float("nan")}, "between 0.5 and 40"),
        ({"ncols": 0}, "ncols must be at least 1"),
    ],
)
def test_refuses_impossible_sizes(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figure(**options)


# The digest


def test_digest_of_lines() -> None:
    fig, ax = labelled()
    # the mean of the squares is 506 / 11 = 46, and r = 120 / sqrt(10 * 1518)
    ax.plot(np.arange(1, 12), np.arange(1, 12) ** 2, label="squares")
    ax.plot([1, 2, 3], [0.5, 0.25, 0.125], label="halves")
    ax.axhline(0.1, label="chance")
    ax.axvline(3)
    ax.axline((0, 1), slope=2)
    ax.axline((0, 1), (2, 3))
    assert shown(fig, note=NOTE) == [
        'axes 1; x "epoch"; y "accuracy"',
        '  line "squares": 11 points; x 1 to 11, mean 6; y 1 to 121, mean 46; r 0.974',
        '  line "halves": 3 points; x 1, 2, 3; y 0.5, 0.25, 0.125',
        '  line "chance": 2 points; y 0.1, 0.1',
        "  line: 2 points; x 3, 3",
        "  endless line: 1 point; x 0; y 1; slope 2",
        "  endless line: 2 points; x 0, 2; y 1, 3",
        f"note: {NOTE}",
    ]


def test_digest_of_bars_and_histograms() -> None:
    fig, axes = figure(ncols=2, nrows=2)
    for ax in axes.flat:
        ax.set(xlabel="x", ylabel="y")
    axes[0, 0].bar(["ce", "lc"], [0.5, 0.75], yerr=[0.1, 0.25], label="accuracy")
    axes[0, 1].barh([1, 2], [3, 4], label="flat")
    axes[1, 0].hist([0.5, 1.5, 1.5, 2.5], bins=[0, 1, 2, 3], label="counts")
    axes[1, 1].bar([1, 2], [1, 1], label="below")
    axes[1, 1].bar([1, 2], [3, 4], bottom=[1, 1], label="above")
    assert shown(fig) == [
        'axes 1; x "x" of ce, lc; y "y"',
        "  errorbars: 2 points; y bars from 0.4, 0.5; to 0.6, 1",
        '  bars "accuracy": 2 points; x 0, 1; y 0.5, 0.75',
        'axes 2; x "x"; y "y"',
        '  bars "flat": 2 points; y 1, 2; x 3, 4',
        'axes 3; x "x"; y "y"',
        '  bars "counts": 3 points; x 0.5, 1.5, 2.5; y 1, 2, 1',
        'axes 4; x "x"; y "y"',
        '  bars "below": 2 points; x 1, 2; y 1, 1',
        '  bars "above": 2 points; x 1, 2; y 4, 5; y from 1, 1',
    ]


def test_digest_of_errorbars_areas_and_stems() -> None:
    fig, ax = labelled()
    ax.errorbar([1, 2], [3, 4], yerr=[[1, 1], [2, 2]], xerr=0.5, label="runs")
    ax.errorbar([1], [3], yerr=1, fmt="none")
    ax.fill_between([0, 1], [0, 0], [1, 2], label="band")
    ax.stem([1, 2], [5, 6], label="spikes")
    ax.vlines([7], 0, 9)
    ax.axvspan(2, 3)
    assert shown(fig)[1:] == [
        '  errorbars "runs": 2 points; x 1, 2; y 3, 4; x bars from 0.5, 1.5; to 1.5, 2.5; '
        "y bars from 2, 3; to 5, 6",
        "  errorbars: 1 point; y bars from 2; to 4",
        '  stems "spikes": 2 points; x 1, 2; y 5, 6',
        "  rectangle: 5 points; x 2, 3, 3, 2, 2",
        '  area "band": 7 points; x 0 to 1, mean 0.429; y 0 to 2, mean 1',
        "  segments: 2 points; x 7, 7; y 0, 9",
    ]


def test_digest_of_scatters_and_images() -> None:
    fig, (left, right) = figure(ncols=2)
    left.scatter([1, 2, 3], [1, 10, 100], c=[0.1, 0.2, 0.3], s=[1, 2, 4], label="points")
    left.set(xlabel="n", ylabel="risk", yscale="log")
    image = right.imshow([[0, 1], [2, np.nan]])
    right.set_axis_off()
    right.set_title("a picture")
    right.text(0, 0, "zero\nhere")
    fig.colorbar(image, label="intensity")
    assert shown(fig) == [
        'axes 1; x "n"; y "risk" (log)',
        '  scatter "points": 3 points; x 1, 2, 3; y 1, 10, 100; size 1, 2, 4; value 0.1, 0.2, 0.3',
        'axes 2 "a picture"',
        "  image of 2 × 2: 4 numbers; value 0, 1, 2, 1 NaN",
        '  texts: "zero here"',
        'axes 3; y "intensity"',
    ]


def test_digest_of_meshes_bins_arrows_and_contours() -> None:
    fig, axes = figure(ncols=2, nrows=2)
    for ax in axes.flat:
        ax.set(xlabel="x", ylabel="y")
    axes[0, 0].pcolormesh([0, 1, 2], [0, 1], [[3, 4]])
    axes[0, 1].hexbin([0, 0, 1], [0, 0, 1], gridsize=(2, 2))  # 9 + 4 cells
    axes[1, 0].quiver([0, 1], [0, 1], [1, 2], [3, 4])
    axes[1, 1].contour([0, 1, 2], [0, 1], [[0, 1, 2], [0, 1, 2]], levels=[0.5, 1.5])
    text = shown(fig)
    assert text[1] == "  area: 6 points; x 0, 1, 2, 0, 1, 2; y 0, 0, 0, 1, 1, 1; value 3, 4"
    assert text[3] == (
        "  cells: 13 points; x 0 to 1, mean 0.5; y 0 to 1, mean 0.5; value 0 to 2, mean 0.231"
    )
    assert text[5] == "  cells: 2 points; x 0, 1; y 0, 1; U 1, 2; V 3, 4"
    assert text[7] == "  contours: 2 levels; levels 0.5, 1.5; x 0.5, 1.5; y 0, 1"


def test_bundles_of_unlabelled_lines_are_one_entry() -> None:
    fig, ax = labelled()
    for seed in range(8):
        ax.plot([0, 1], [0, seed])
    ax.plot([0, 1], [5, 5], label="mean")
    assert shown(fig)[1:] == [
        "  8 lines: 16 points; x 0 to 1, mean 0.5; y 0 to 7, mean 1.75; r 0.734",
        '  line "mean": 2 points; x 0, 1; y 5, 5',
    ]


def test_names_on_the_ticks_are_digested() -> None:
    fig, ax = labelled()
    ax.bar([0, 1], [1, 2])
    ax.set_xticks([0, 1], ["hinge", "LC"])
    ax.set_yticks([0, 1, 2])
    assert shown(fig)[0] == 'axes 1; x "epoch" of hinge, LC; y "accuracy"'


def test_values_far_from_zero_get_a_fourth_digit() -> None:
    fig, ax = labelled()
    ax.plot([2019, 2026], [0.98123, 0.99456])
    ax.plot([1, 2], [0.7 * (1 + 1e-7), 0.7], label="single precision")
    assert shown(fig)[1:] == [
        "  line: 2 points; x 2019, 2026; y 0.9812, 0.9946",
        '  line "single precision": 2 points; x 1, 2; y 0.7, 0.7',
    ]


def test_insets_and_twins_are_digested_and_need_no_second_label() -> None:
    fig, ax = labelled()
    ax.plot([1, 2], [3, 4], label="outer")
    ax.inset_axes((0.5, 0.1, 0.3, 0.3)).plot([1], [30], label="inner")
    twin = ax.twinx()
    twin.plot([1, 2], [300, 400], label="twin")
    twin.set_ylabel("loss")
    text = "\n".join(shown(fig))
    assert all(name in text for name in ('"outer"', '"inner"', '"twin"', '"loss"'))


def test_nan_and_infinite_points_are_counted() -> None:
    fig, ax = labelled()
    ax.plot([1, 2, 3, 4], [1, np.nan, np.inf, np.nan])
    ax.plot(np.arange(9), np.ma.masked_greater(np.arange(9), 7))
    assert shown(fig)[1:] == [
        "  line: 4 points; x 1, 2, 3, 4; y 1, 2 NaN, 1 inf",
        "  line: 9 points; x 0 to 8, mean 4; y 0 to 7, mean 3.5, 1 NaN; r 1",
    ]


@pytest.mark.parametrize(("at", "to"), [(3, 1.1), (0, -0.2), (19, 0.9)])
def test_digest_changes_with_one_point(at: int, to: float) -> None:
    texts = []
    for y in (np.linspace(0, 1, 20), np.linspace(0, 1, 20)):
        if texts:
            y[at] = to
        fig, ax = labelled()
        ax.plot(y)
        texts.append(shown(fig))
    assert texts[0] != texts[1]


def test_digest_changes_with_the_order() -> None:
    """A shuffled curve has the same extremes and mean; the correlation tells it apart."""
    texts = []
    for y in (np.linspace(0, 1, 20), np.random.default_rng(0).permutation(np.linspace(0, 1, 20))):
        fig, ax = labelled()
        ax.plot(y)
        texts.append(shown(fig))
    assert texts[0] != texts[1]


def test_digest_ignores_noise_of_other_machines() -> None:
    """Ties, zeros, constants, and what cancels in a mean: each moved by its last bits."""
    texts = set()
    for sign in (-1, 0, 1):
        noise = 1 + sign * np.array([3, -2, 1, -4, 2, -1, 3, 2]) * 1e-15
        fig, ax = labelled()
        ax.plot(np.arange(8), np.array([0.1235, 2.5, -0.0005, 7.125, 1, -1, 0, 3]) * noise)
        ax.plot(np.arange(8), np.array([-4, -3, -2, -1, 1, 2, 3, 4]) * noise)
        ax.plot(np.arange(8), np.full(8, 0.7) * noise)
        ax.plot([0, 1, 2], [0.1235, 0.9865, sign * 1e-17])
        texts.add("\n".join(shown(fig)))
    assert len(texts) == 1
    assert texts.pop().splitlines()[4] == "  line: 3 points; x 0, 1, 2; y 0.124, 0.987, 0"


def test_small_numbers_on_a_log_axis_are_not_noise() -> None:
    fig, ax = labelled()
    ax.plot([1, 2], [1e-14, 1])
    ax.set_yscale("log")
    assert shown(fig)[1].endswith("y 1e-14, 1")


def test_digest_holds_no_address() -> None:
    fig, ax = labelled()
    ax.plot([1, 2])
    output = show(fig)
    assert repr(output) == output.digest
    assert "0x" not in repr(output)


# What is refused


def test_missing_labels_are_named() -> None:
    fig, (left, right) = figure(ncols=2)
    left.plot([1, 2], label="hinge")
    left.set(xlabel="epoch", ylabel="risk")
    right.plot([1, 2], label="LC")
    right.set_ylabel("risk")
    with pytest.raises(ValueError, match=r'axes 2 of 2 \(line "LC"\) has no label on x: .*xlabel='):
        show(fig)
    right.set(xlabel="  ", ylabel="")
    with pytest.raises(ValueError, match="no label on x and y"):
        show(fig)
    right.set(xlabel="epoch", ylabel="risk")
    assert show(fig).png  # mended, the same figure shows


def test_labels_may_be_shared_or_the_figures() -> None:
    fig, axes = figure(nrows=2, sharex=True)
    for ax in axes:
        ax.plot([1, 2])
    axes[1].set_xlabel("epoch")
    with pytest.raises(ValueError, match=r"axes 1 of 2.*no label on y:"):
        show(fig)
    fig.supylabel("risk")
    assert [line for line in shown(fig) if line.startswith("axes")] == [
        'axes 1; x "epoch"; y "risk"',
        'axes 2; x "epoch"; y "risk"',
    ]


def test_a_colorbar_needs_its_label() -> None:
    fig, ax = labelled()
    fig.colorbar(ax.imshow([[0, 1]]))
    with pytest.raises(ValueError, match=r"axes 2 of 2 \(colorbar\) has no label on y"):
        show(fig)


def test_refuses_a_figure_without_data() -> None:
    fig, ax = labelled()
    with pytest.raises(ValueError, match="draws no data"):
        show(fig)
    ax.plot([], [])
    ax.plot([np.nan], [np.nan])
    ax.text(0, 0, "words are no data")
    with pytest.raises(ValueError, match="draws no data"):
        show(fig)
    with pytest.raises(ValueError, match="draws no data"):
        show(mpl.figure.Figure())


def test_refuses_an_empty_panel_unless_switched_off() -> None:
    fig, (left, right) = figure(ncols=2)
    left.plot([1, 2])
    left.set(xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match=r"axes 2 of 2 draws no data.*set_axis_off"):
        show(fig)
    right.set_axis_off()
    assert len(shown(fig)) == 2


def test_refuses_a_second_showing() -> None:
    fig, ax = labelled()
    ax.plot([1, 2])
    show(fig)
    with pytest.raises(ValueError, match="shown or closed already"):
        show(fig)


def test_refuses_a_closed_figure() -> None:
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    ax.set(xlabel="x", ylabel="y")
    plt.close(fig)
    with pytest.raises(ValueError, match="shown or closed already"):
        show(fig)


@pytest.mark.parametrize("layout", [None, "tight", "constrained"])
def test_any_layout_takes_colorbar_and_note(layout: str | None) -> None:
    fig, ax = plt.subplots(layout=layout)
    fig.colorbar(ax.imshow(np.eye(3)), label="value")
    ax.set(xlabel="column", ylabel="row")
    output = show(fig, note=NOTE)
    assert output.digest.endswith(NOTE)
    assert not (pixels(output)[-1] < 128).any()


def test_refuses_a_note_that_says_nothing() -> None:
    fig, ax = labelled()
    ax.plot([1, 2])
    with pytest.raises(ValueError, match="note is blank"):
        show(fig, note=" ")
    with pytest.raises(TypeError, match=r"such as Dataset\.label, not int"):
        show(fig, note=5000)  # type: ignore[arg-type]
    assert show(fig, note="digits").png


@pytest.mark.parametrize("thing", [None, "figure", [1, 2]])
def test_refuses_what_is_no_figure(thing: object) -> None:
    with pytest.raises(TypeError, match="must be a matplotlib Figure"):
        show(thing)  # type: ignore[arg-type]


def test_titles_belong_in_the_caption() -> None:
    fig, ax = labelled()
    ax.plot([1, 2])
    ax.set_title("Accuracy")
    with pytest.raises(ValueError, match="move the title 'Accuracy' into the figure's caption"):
        show(fig)
    ax.set_title("")
    fig.suptitle("Everything")
    with pytest.raises(ValueError, match="'Everything'"):
        show(fig)


def test_refuses_three_dimensions() -> None:
    fig = mpl.figure.Figure()
    fig.add_subplot(projection="3d").plot([0, 1], [0, 1], [0, 1])
    with pytest.raises(ValueError, match="three-dimensional"):
        show(fig)


@pytest.mark.parametrize("how", ["scatter", "plot"])
def test_refuses_crowded_scatters(how: str) -> None:
    points = np.random.default_rng(0).normal(size=(2, 20_001))
    fig, ax = labelled(width="margin")
    if how == "scatter":
        artist = ax.scatter(*points, s=1, color=COLOURS["blue"])
    else:
        (artist,) = ax.plot(*points, ".", color=COLOURS["blue"])
    with pytest.raises(ValueError, match=r"scatters 20,001 points, over 20,000.*hexbin"):
        show(fig)
    artist.set_rasterized(True)
    assert "20001 points" in shown(fig)[1]


def test_long_joined_lines_are_fine() -> None:
    fig, ax = labelled()
    ax.plot(np.linspace(0, 1, 50_000))
    assert "50000 points" in shown(fig)[1]


def test_refuses_a_heavy_picture_with_its_size() -> None:
    fig, ax = labelled()
    ax.imshow(np.random.default_rng(0).random((500, 800)), aspect="auto")
    with pytest.raises(
        ValueError, match=r"takes \d{3}\.\d KB as PNG, over the limit of 80 KB: .*hexbin"
    ):
        show(fig)


# The picture


def demo() -> FigureOutput:
    fig, (left, right) = figure(ncols=2)
    rng = np.random.default_rng(0)
    for label in ("cross-entropy", "hinge", "LC"):
        left.plot(np.arange(40), rng.random(40).cumsum(), label=label)
    left.set(xlabel="epoch", ylabel="risk")
    right.scatter(*rng.normal(size=(2, 300)), c=rng.random(300))
    right.set(xlabel="margin", ylabel="logit")
    return show(fig, note=NOTE)


def test_png_is_small_opaque_and_without_metadata() -> None:
    output = demo()
    assert len(output.png) < plotting.MAX_BYTES
    assert set(chunks(output.png)) == {b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tEXt"}  # no tIME
    image = Image.open(io.BytesIO(output.png))
    expected = hashlib.sha256(output.digest.encode()).hexdigest()[:16]
    assert image.info == {"digest": expected}, "no date, no program, no path"
    assert (image.mode, image.size[0]) == ("P", 936)


def test_colours_survive_the_palette() -> None:
    seen = {tuple(pixel) for pixel in pixels(demo()).reshape(-1, 3)}
    names = ("blue", "vermillion", "green")
    wanted = {tuple(int(COLOURS[n][i : i + 2], 16) for i in (1, 3, 5)) for n in names}
    assert wanted | {(255, 255, 255)} <= seen


def repaletted(rgb: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "PNG")
    return pixels(FigureOutput(plotting._palette_png(buffer.getvalue(), ""), ""))


def test_palette_of_few_colours_is_lossless() -> None:
    codes = np.arange(60_000, dtype=np.uint32) % 256 * (2**24 // 256 + 1)
    rgb = (codes[:, None] >> np.array([16, 8, 0]) & 255).astype(np.uint8).reshape(200, 300, 3)
    assert len(np.unique(codes)) == 256
    np.testing.assert_array_equal(repaletted(rgb), rgb)


def test_palette_of_many_colours_keeps_the_books_own() -> None:
    """60,000 colours, a white frame and thin lines in the book's blue: 0 to 255 a channel."""
    down, along = np.mgrid[0:200, 0:300]
    rgb = np.dstack([down, along * 255 // 299, np.full_like(down, 90)]).astype(np.uint8)
    assert len(np.unique(rgb.reshape(-1, 3), axis=0)) > 50_000
    rgb[:20], rgb[50:52] = 255, (0x00, 0x72, 0xB2)
    off = np.abs(repaletted(rgb).astype(int) - rgb).max(axis=2)  # [h, w]
    assert off[:20].max() == 0
    assert off[50:52].max() <= 2
    assert off.max() <= 24


def test_thin_lines_over_a_picture_keep_their_colour() -> None:
    fig, ax = labelled()
    waves = np.add.outer(np.sin(np.arange(60) / 9), np.cos(np.arange(90) / 7))
    ax.imshow(waves, cmap="turbo", aspect="auto", interpolation="bilinear", extent=(0, 1, 0, 1))
    ax.plot([0, 1], [0, 1], color=COLOURS["blue"], linewidth=1)
    before = np.asarray(Image.open(io.BytesIO(plotting._render(fig, None))).convert("RGB"))
    after = pixels(show(fig))
    for colour, worst in ((matplotlib.colors.to_rgb(COLOURS["blue"]), 5), ((1, 1, 1), 0)):
        where = (before == np.round(np.array(colour) * 255)).all(axis=2)
        assert where.sum() > 20
        assert np.abs(after[where].astype(int) - before[where]).max() <= worst


PROCESS = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("cases", sys.argv[1])
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
output = cases.demo()
print(hashlib.sha256(output.png + output.digest.encode()).hexdigest())
"""


def test_two_processes_draw_the_same_bytes() -> None:
    """With other hash seeds, so that nothing may hang on the order of a set."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, __file__],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    printed = {run.communicate()[0].strip() for run in runs}
    output = demo()
    here = hashlib.sha256(output.png + output.digest.encode()).hexdigest()
    assert printed == {here}


def test_settings_of_the_process_are_neither_used_nor_changed() -> None:
    expected = demo()
    loud = {"font.size": 23, "savefig.dpi": 30, "figure.facecolor": "black", "axes.grid": False}
    with mpl.rc_context({**loud, "savefig.transparent": True, "savefig.bbox": "tight"}):
        before = dict(mpl.rcParams)
        assert demo().png == expected.png
        assert dict(mpl.rcParams) == before


def test_style_is_undone() -> None:
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["figure.dpi"] == 144
        assert mpl.rcParams["axes.prop_cycle"].by_key()["color"][0] == COLOURS["blue"]
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(("copies", "lines"), [(1, 1), (2, 2), (4, 3)])
def test_note_stands_below_everything_and_wraps(copies: int, lines: int) -> None:
    """Each line of the note lifts the axes by its height: 8 points x 1.35 at 2 pixels a point."""
    spines = []
    for note in (None, " ".join([NOTE] * copies)):
        fig, ax = labelled()
        ax.plot([1, 2])
        dark = pixels(show(fig, note=note)).min(axis=2) < 128  # [h, w]
        spines.append(int(np.flatnonzero(dark.mean(axis=1) > 0.7).max()))
        assert not dark[-1].any()
        assert not dark[-21 * lines :, -8:].any()  # nothing runs off the right edge
    assert spines[0] - spines[1] == pytest.approx(21.6 * lines, abs=2)


def test_markers_of_long_lines_are_thinned_and_scatters_kept() -> None:
    fig, ax = labelled()
    (long,), (short,) = ax.plot(np.arange(100)), ax.plot(np.arange(20))
    (dots,) = ax.plot(np.arange(100), "o")
    show(fig)
    assert (long.get_markevery(), short.get_markevery(), dots.get_markevery()) == (10, None, None)


# The notebook


def test_mimebundle() -> None:
    output = demo()
    bundle = output._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == output.png
    assert bundle["text/plain"] == output.digest
    assert set(output._repr_mimebundle_(include=["text/plain"])) == {"text/plain"}
    assert set(output._repr_mimebundle_(exclude={"text/plain"})) == {"image/png"}
    assert json.dumps(bundle)


def test_nothing_stays_open() -> None:
    open_before = plt.get_fignums()
    demo()
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    ax.set(xlabel="x", ylabel="y")
    show(fig)
    assert plt.get_fignums() == open_before


def test_shown_figures_are_freed() -> None:
    fig, ax = labelled()
    ax.plot([1, 2])
    output = show(fig)
    alive = weakref.ref(fig)
    del fig, ax
    gc.collect()
    assert alive() is None
    assert output.png


NOTEBOOK = """
%matplotlib inline
import matplotlib.pyplot as plt
from proofread.plotting import figure, show
"""
OURS = """
fig, ax = figure()
ax.plot([1, 2], label="ours")
ax.set(xlabel="x", ylabel="y")
show(fig, note="a note")
"""
PYPLOTS = OURS.replace("figure()", "plt.subplots()")


def test_inline_backend_shows_each_figure_once() -> None:
    cells = [
        nbformat.v4.new_code_cell(code) for code in (NOTEBOOK, OURS, PYPLOTS, "plt.get_fignums()")
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    first, ours, pyplots, left = (cell.outputs for cell in notebook.cells)
    assert first == []  # no warning either
    for outputs in (ours, pyplots):
        (result,) = outputs
        assert set(result["data"]) == {"image/png", "text/plain"}
        assert result["data"]["text/plain"].splitlines()[1:] == [
            '  line "ours": 2 points; x 0, 1; y 1, 2',
            "note: a note",
        ]
    assert left[0]["data"]["text/plain"] == "[]"


def test_import_is_light() -> None:
    """The command line reaches this module: no drawing library may load with it."""
    code = (
        "import sys, proofread.plotting; print({'matplotlib', 'numpy', 'PIL'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
