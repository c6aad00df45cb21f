"""Figures of the book: one style, a small deterministic PNG, and a text digest of what is drawn.

The pattern, in one cell::

    fig, ax = figure()
    ax.plot(epochs, accuracy, label="cross-entropy")
    ax.set(xlabel="epoch", ylabel="test accuracy")
    show(fig, note=dataset.label)

A figure made here never enters ``pyplot``: nothing to close, nothing shown twice, and no setting of
the process is read or left changed. Plotting calls between ``figure`` and ``show`` do read
matplotlib's own settings for what the axes don't decide (legend, ``"C0"`` colours, caps): put them
under ``with style():`` where that matters. The caption says what the figure shows, so there is no
title inside.
"""

from __future__ import annotations

import base64
import io
import logging
import math
import sys
import textwrap
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import matplotlib.figure
    import numpy

#: The palette of Okabe and Ito (2008), *Color Universal Design*, told apart by every common colour
#: vision.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "black": "#000000",
        "orange": "#E69F00",
        "sky": "#56B4E9",
        "green": "#009E73",
        "yellow": "#F0E442",
        "blue": "#0072B2",
        "vermillion": "#D55E00",
        "purple": "#CC79A7",
    }
)

#: The names of those with a contrast of at least 3 to 1 on white, in the order of the cycle. The
#: other three are for areas with a dark edge, never for lines or markers.
LINE_COLOURS = ("blue", "vermillion", "green", "purple", "black")

#: Named figure widths, in inches; 6.5 fills the text column.
WIDTHS: Mapping[str, float] = MappingProxyType({"page": 6.5, "half": 4.5, "margin": 3.25})

DPI = 144
MAX_BYTES = 80_000  # of a figure's PNG
MAX_SCATTER = 20_000  # points that are drawn one by one

_LINESTYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = "os^DvPX<>*"
_NO_LINE = ("None", "none", " ", "")
_LISTED = 6  # series up to this long are listed, longer ones summarised
_NOISE = 1e-9  # relative: smaller differences are rounding noise of sums, and invisible
_NOTE_POINTS = 8.0
_shown: weakref.WeakSet[Any] = weakref.WeakSet()


def style() -> AbstractContextManager[None]:
    """A context in which matplotlib draws in the book's style, whatever the user's settings.

    White opaque background, light grid, 10-point labels, and a cycle of ten line styles that
    differ in colour, dash and marker. On exit every setting is what it was.

    Returns:
        the context manager.
    """
    _import_quietly()
    import matplotlib.style

    return matplotlib.style.context(["default", _settings()])


def figure(
    width: str | float = "page",
    *,
    nrows: int = 1,
    ncols: int = 1,
    height: float | None = None,
    sharex: bool | Literal["none", "all", "row", "col"] = False,
    sharey: bool | Literal["none", "all", "row", "col"] = False,
) -> tuple[matplotlib.figure.Figure, Any]:
    """An empty figure in the book's style, outside ``pyplot``.

    Args:
        width: ``"page"`` (6.5 inches), ``"half"`` (4.5), ``"margin"`` (3.25), or inches (1 to 16).
        nrows: rows of panels.
        ncols: columns of panels.
        height: in inches; by default the panels are 3:5, and 2 to 3.8 inches high.
        sharex: as in ``matplotlib.figure.Figure.subplots``.
        sharey: likewise.

    Returns:
        the figure and its axes: one ``Axes`` for a single panel, else an array of them, shape
        ``(ncols,)``, ``(nrows,)`` or ``(nrows, ncols)``.

    Raises:
        ValueError: an unknown or impossible size, or no panel.
    """
    inches = _inches(width)
    if nrows < 1 or ncols < 1:
        raise ValueError(f"nrows and ncols must be at least 1, not {nrows} and {ncols}")
    if height is None:
        height = nrows * min(max(0.6 * inches / ncols, 2.0), 3.8)
    if not 0.5 <= height <= 40:
        raise ValueError(f"height must lie between 0.5 and 40 inches, not {height}")
    with style():
        from matplotlib.figure import Figure

        fig = Figure(figsize=(inches, height), layout="constrained")
        return fig, fig.subplots(nrows, ncols, sharex=sharex, sharey=sharey)


@dataclass(frozen=True)
class FigureOutput:
    """What a cell displays: the picture, and in text what it draws.

    Attributes:
        png: the picture, at most 80 KB; equal data give equal bytes. Its only metadata is a hash of
            the digest.
        digest: the data drawn, rounded to three significant digits: what tests compare.
    """

    png: bytes = field(repr=False)
    digest: str

    def __repr__(self) -> str:
        return self.digest

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, str]:
        bundle = {
            "image/png": base64.b64encode(self.png).decode("ascii"),
            "text/plain": self.digest,
        }
        wanted = set(bundle if include is None else include) - set(exclude or ())
        return {mime: content for mime, content in bundle.items() if mime in wanted}


def show(fig: matplotlib.figure.Figure, *, note: str | None = None) -> FigureOutput:
    """Render a figure once, digest its data, and close it. Let it be a cell's last expression.

    The PNG has 144 dots an inch, an opaque white background and a palette of at most 256 colours.
    The digest gives, for each axes, its labels, and for each thing drawn its label, number of
    points, and smallest, largest and mean coordinates (all coordinates, up to 6 points) to three
    significant digits, or four where they vary by less than a tenth; ``r`` is the correlation of
    x and y. What is under 1e-9 of a linear axis' span prints as 0. Many things alike without a
    label are pooled. Long lines keep about ten of their markers.

    Args:
        fig: a figure from ``figure`` (or ``pyplot``), with data and labels on every axes. An axes
            may share its label with another or with the figure (``supxlabel``), or be switched
            off (``set_axis_off``, for pictures).
        note: what data the figure shows, with tier and size, such as ``Dataset.label``; printed
            small at the foot and in the digest.

    Returns:
        the displayable output.

    Raises:
        TypeError: not a figure, or the note isn't text.
        ValueError: the note is blank; or the figure was shown or closed before, has no data, lacks
            a label, carries a title that belongs in the caption, is three-dimensional, scatters
            over 20,000 points without ``rasterized=True``, or takes over 80 KB as PNG.
    """
    _check_note(note)
    _check_figure(fig)
    with style():
        panels = list(_panels(fig.axes))
        digest = _digest(fig, panels, note)
        for ax in panels:
            _thin_markers(ax)
        png = _palette_png(_render(fig, note), digest)
    if len(png) > MAX_BYTES:
        raise ValueError(
            f"the figure takes {len(png) / 1000:.1f} KB as PNG, over the limit of "
            f"{MAX_BYTES / 1000:.0f} KB: bin or thin a scatter (hexbin), coarsen an image, "
            "make the figure smaller, or split it"
        )
    _close(fig)
    return FigureOutput(png, digest)


# Style


def _import_quietly() -> None:
    """Matplotlib's first import logs of font caches and folders: noise, with a machine's paths."""
    if "matplotlib.font_manager" in sys.modules:
        return
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib.font_manager  # noqa: F401
    finally:
        logger.setLevel(level)


def _settings() -> dict[str, Any]:
    # "default" comes first in the context: what isn't set here is matplotlib's own default, and
    # sizes stay near those, so that calls outside the context look alike
    return {
        "figure.dpi": DPI,
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
        "font.size": 10,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "axes.prop_cycle": _cycle(),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.edgecolor": "#444444",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.6,
        "legend.fontsize": 9,
    }


def _cycle() -> Any:
    """Ten styles; the second five repeat the colours with other dashes and markers."""
    from cycler import cycler

    turns = range(len(_MARKERS))
    kinds = len(LINE_COLOURS)
    return cycler(
        color=[COLOURS[LINE_COLOURS[i % kinds]] for i in turns],
        linestyle=[_LINESTYLES[(i + i // kinds) % len(_LINESTYLES)] for i in turns],
        marker=list(_MARKERS),
        linewidth=[1.6 for _ in turns],
        markersize=[5.0 for _ in turns],
    )


def _inches(width: str | float) -> float:
    if isinstance(width, str):
        if width not in WIDTHS:
            raise ValueError(f"width must be one of {', '.join(WIDTHS)} or inches, not {width!r}")
        return WIDTHS[width]
    if not 1 <= width <= 16:
        raise ValueError(f"width must lie between 1 and 16 inches, not {width}")
    return float(width)


# What a figure must have


def _check_figure(fig: Any) -> None:
    from matplotlib.figure import Figure

    if not isinstance(fig, Figure):
        raise TypeError(f"fig must be a matplotlib Figure, not {type(fig).__name__}")
    if fig in _shown or _closed_in_pyplot(fig):
        raise ValueError("this figure was shown or closed already: draw it anew, then show it once")
    panels = list(_panels(fig.axes))
    if not any(_has_data(ax) for ax in panels):
        raise ValueError("the figure draws no data: plot something on its axes first")
    _check_titles(fig, panels)
    for number, ax in enumerate(panels, 1):
        _check_axes(fig, ax, f"axes {number} of {len(panels)}")


def _check_note(note: Any) -> None:
    if note is not None and not isinstance(note, str):
        raise TypeError(f"note must be text, such as Dataset.label, not {type(note).__name__}")
    if note is not None and not note.strip():
        raise ValueError("note is blank: say which data the figure shows, or leave it out")


def _closed_in_pyplot(fig: Any) -> bool:
    number = getattr(fig, "number", None)  # only pyplot numbers its figures
    pyplot = sys.modules.get("matplotlib.pyplot")
    return number is not None and pyplot is not None and not pyplot.fignum_exists(number)


def _panels(axes: Iterable[Any]) -> Iterator[Any]:
    """The visible axes, each followed by its insets."""
    from matplotlib.axes import Axes

    for ax in axes:
        if isinstance(ax, Axes) and ax.get_visible() and (ax.axison or _has_data(ax)):
            yield ax
        yield from _panels(getattr(ax, "child_axes", ()))


def _check_titles(fig: Any, panels: list[Any]) -> None:
    titles = [ax.get_title(loc) for ax in panels for loc in ("left", "center", "right")]
    title = fig.get_suptitle() or (any(titles) and len(panels) == 1 and max(titles))
    if title:
        raise ValueError(
            f"move the title {title!r} into the figure's caption (panels may keep one)"
        )


def _check_axes(fig: Any, ax: Any, name: str) -> None:
    if ax.name == "3d":
        raise ValueError(f"{name} is three-dimensional: show it as an image, contours or slices")
    if not _has_data(ax):
        raise ValueError(f"{name} draws no data: plot something, or hide it with set_axis_off()")
    _check_scatters(ax, name)
    missing = [which for which in _needed_labels(ax) if not _axis_label(fig, ax, which)]
    if missing:
        raise ValueError(
            f"{name} ({_contents(ax)}) has no label on {' and '.join(missing)}: "
            f"ax.set({', '.join(f'{which}label=…' for which in missing)})"
        )


def _check_scatters(ax: Any, name: str) -> None:
    unjoined = [line for line in ax.lines if line.get_linestyle() in _NO_LINE]
    for artist in (*ax.collections, *unjoined):
        count = _points(artist)
        if count > MAX_SCATTER and not artist.get_rasterized():
            raise ValueError(
                f"{name} scatters {count:,} points, over {MAX_SCATTER:,}, where they hide each "
                "other: bin them (ax.hexbin, ax.hist2d), draw a sample, or pass rasterized=True "
                "if they must all be drawn"
            )


def _points(artist: Any) -> int:
    """How many markers a scatter or a line draws; 0 for areas, meshes and binned points."""
    from matplotlib.collections import PathCollection

    if isinstance(artist, PathCollection):
        return _floats(artist.get_offsets()).shape[0]
    return len(artist.get_xdata()) if hasattr(artist, "get_xdata") else 0


def _contents(ax: Any) -> str:
    """Enough to recognise an axes by: its first labelled element."""
    if _is_colorbar(ax):
        return "colorbar"
    drawn = list(_drawn(ax))
    labelled = [each for each in drawn if each.label] or drawn
    return _quoted(labelled[0].kind, labelled[0].label)


def _needed_labels(ax: Any) -> tuple[str, ...]:
    if not ax.axison or _is_inset(ax):
        return ()
    if _is_colorbar(ax):
        return ("y" if ax._colorbar.orientation == "vertical" else "x",)
    return ("x", "y")


def _is_colorbar(ax: Any) -> bool:
    return hasattr(ax, "_colorbar")  # matplotlib's own mark; there is no public one


def _is_inset(ax: Any) -> bool:
    return ax not in ax.figure.axes


def _axis_label(fig: Any, ax: Any, which: str) -> str:
    """The label of the axis, or of one that shares its scale, or the figure's."""
    shared = getattr(ax, f"get_shared_{which}_axes")().get_siblings(ax)
    labels = [getattr(each, f"get_{which}label")() for each in (ax, *shared)]
    return next(filter(None, [*labels, getattr(fig, f"get_sup{which}label")()]), "").strip()


def _has_data(ax: Any) -> bool:
    import numpy as np

    return any(np.isfinite(column.values).any() for each in _drawn(ax) for column in each.columns)


# What is drawn


@dataclass(eq=False)
class _Column:
    """One coordinate of the points drawn; what is closer to zero than ``floor`` prints as 0."""

    name: str
    values: numpy.ndarray  # [n]
    floor: float


@dataclass(eq=False)
class _Drawn:
    """One line of the digest."""

    kind: str
    label: str
    columns: list[_Column]
    unit: str = "point"


def _drawn(ax: Any) -> Iterator[_Drawn]:
    """Everything with data on ``ax``; what belongs to a container is reported with it."""
    from matplotlib.patches import FancyArrowPatch

    grouped: set[Any] = set()
    for container in ax.containers:
        grouped.update(container.get_children())
        yield from _container(ax, container)
    patches = [p for p in _visible(ax.patches, grouped) if not isinstance(p, FancyArrowPatch)]
    yield from _pooled(_line(ax, line) for line in _visible(ax.lines, grouped))
    yield from _pooled(_patch(ax, patch) for patch in patches)
    yield from _pooled(_collection(ax, each) for each in _visible(ax.collections, grouped))
    yield from (_image(image) for image in _visible(ax.images, grouped))


def _visible(artists: Iterable[Any], grouped: set[Any]) -> list[Any]:
    return [each for each in artists if each.get_visible() and each not in grouped]


def _label(*artists: Any) -> str:
    """The labels of the artists that have one; matplotlib's own placeholders start with ``_``."""
    labels = [str(each.get_label() or "_") for each in artists]
    return ", ".join(dict.fromkeys(each for each in labels if not each.startswith("_")))


def _container(ax: Any, container: Any) -> Iterator[_Drawn]:
    from matplotlib.container import BarContainer, ErrorbarContainer, StemContainer

    children = [each for each in container.get_children() if each.get_visible()]
    if not children:
        return
    if isinstance(container, BarContainer):
        yield _bars(ax, container)
    elif isinstance(container, ErrorbarContainer):
        yield _errorbar(ax, container)
    elif isinstance(container, StemContainer):
        stems = _line(ax, container.markerline)
        yield _Drawn("stems", _label(container) or stems.label, stems.columns)
    else:  # another library's: its parts one by one
        yield from (_line(ax, each) for each in children if hasattr(each, "get_xydata"))


def _bars(ax: Any, bars: Any) -> _Drawn:
    along, across = ("x", "y") if bars.orientation != "horizontal" else ("y", "x")
    boxes = [(each.get_xy(), (each.get_width(), each.get_height())) for each in bars.patches]
    i, j = (0, 1) if along == "x" else (1, 0)
    columns = [
        _column(ax, along, [corner[i] + size[i] / 2 for corner, size in boxes]),
        _column(ax, across, [corner[j] + size[j] for corner, size in boxes]),
    ]
    if any(corner[j] for corner, _ in boxes):  # stacked or floating
        columns.append(_column(ax, across, [corner[j] for corner, _ in boxes], f"{across} from"))
    return _Drawn("bars", _label(bars, *bars.patches), columns)


def _errorbar(ax: Any, container: Any) -> _Drawn:
    """The points, and the ends of the bars through them."""
    data, _, bars = container.lines
    columns = _line(ax, data).columns if data is not None else []
    names = [name for name, has in (("x", container.has_xerr), ("y", container.has_yerr)) if has]
    for name, collection in zip(names, bars or (), strict=True):
        ends = [segment["xy".index(name)] for segment in _segments(collection)]
        columns.append(_column(ax, name, [min(each) for each in ends], f"{name} bars from"))
        columns.append(_column(ax, name, [max(each) for each in ends], "to"))
    return _Drawn("errorbars", _label(container), columns)


def _segments(collection: Any) -> list[Any]:
    """Each segment as ``[2, ends]``."""
    return [segment.T for segment in collection.get_segments() if len(segment)]


def _line(ax: Any, line: Any) -> _Drawn:
    from matplotlib.lines import AxLine

    if isinstance(line, AxLine):
        return _endless_line(ax, line)
    x, y = line.get_xdata(orig=False), line.get_ydata(orig=False)
    return _Drawn("line", _label(line), _data_columns(ax, line.get_transform(), x, y))


def _endless_line(ax: Any, line: Any) -> _Drawn:
    """What ``axline`` draws: through one point with a slope, or through two."""
    points = [each for each in (line.get_xy1(), line.get_xy2()) if each is not None]
    columns = _xy(ax, _floats(points))
    if line.get_slope() is not None:
        columns.append(_own_column("slope", [line.get_slope()]))
    return _Drawn("endless line", _label(line), columns)


def _pooled(entries: Iterable[_Drawn]) -> Iterator[_Drawn]:
    """As they are, but many alike without a label as one (boxplots, bundles of seeds)."""
    alike: dict[tuple[str, ...], list[_Drawn]] = {}
    for each in entries:
        # what has a label is alike to nothing: its key is its own
        key = (each.kind, *(c.name for c in each.columns)) if not each.label else (f"{id(each)}",)
        alike.setdefault(key, []).append(each)
    for bundle in alike.values():
        yield from bundle if len(bundle) <= _LISTED else [_bundled(bundle)]


def _bundled(bundle: list[_Drawn]) -> _Drawn:
    import numpy as np

    columns = [
        _Column(of[0].name, np.concatenate([c.values for c in of]), of[0].floor)
        for of in zip(*(each.columns for each in bundle), strict=True)
    ]
    return _Drawn(f"{len(bundle)} {bundle[0].kind}s", "", columns)


def _patch(ax: Any, patch: Any) -> _Drawn:
    vertices = patch.get_patch_transform().transform_path(patch.get_path()).vertices
    columns = _data_columns(ax, patch.get_data_transform(), *vertices.T)
    return _Drawn(type(patch).__name__.lower(), _label(patch), columns)


def _collection(ax: Any, collection: Any) -> _Drawn:
    from matplotlib.collections import LineCollection, PathCollection
    from matplotlib.contour import ContourSet

    if isinstance(collection, ContourSet):
        return _contours(ax, collection)
    offsets = _floats(collection.get_offsets())  # [n, 2]
    if isinstance(collection, PathCollection) or len(offsets) > 1:
        kind = "scatter" if isinstance(collection, PathCollection) else "cells"
        columns = _xy(ax, offsets) + _sizes(collection)
    else:
        kind = "segments" if isinstance(collection, LineCollection) else "area"
        columns = _data_columns(ax, collection.get_transform(), *_vertices(collection).T)
    return _Drawn(kind, _label(collection), columns + _values(collection))


def _contours(ax: Any, contours: Any) -> _Drawn:
    """Levels and extent: how many corners a contour has hangs on the last bits of the data."""
    import numpy as np

    corners = _vertices(contours)
    ends = np.array([corners.min(axis=0), corners.max(axis=0)]) if len(corners) else corners
    columns = [_own_column("levels", contours.levels), *_xy(ax, ends)]
    return _Drawn("contours", _label(contours), columns, "level")


def _vertices(collection: Any) -> numpy.ndarray:
    """All corners of a collection's shapes, a mesh's included: ``[n, 2]``."""
    import numpy as np

    if hasattr(collection, "get_coordinates"):
        return _floats(collection.get_coordinates()).reshape(-1, 2)
    paths = [path.vertices for path in collection.get_paths() if len(path.vertices)]
    return np.concatenate(paths) if paths else np.empty((0, 2))


def _sizes(collection: Any) -> list[_Column]:
    """Of the markers, where they differ."""
    sizes = collection.get_sizes() if hasattr(collection, "get_sizes") else ()
    return [_own_column("size", sizes)] if len(set(map(float, sizes))) > 1 else []


def _values(collection: Any) -> list[_Column]:
    """The numbers behind the colours, if any, and an arrow field's components."""
    arrays = [(name, getattr(collection, name, None)) for name in ("U", "V")]
    arrays.append(("value", collection.get_array()))
    return [_own_column(name, values) for name, values in arrays if values is not None]


def _image(image: Any) -> _Drawn:
    pixels = image.get_array()
    shape = " × ".join(map(str, pixels.shape))
    return _Drawn(f"image of {shape}", _label(image), [_own_column("value", pixels)], "number")


def _xy(ax: Any, points: numpy.ndarray) -> list[_Column]:
    return [_column(ax, "x", points[:, 0]), _column(ax, "y", points[:, 1])]


def _data_columns(ax: Any, transform: Any, x: Any, y: Any) -> list[_Column]:
    """Those of x and y that are data: ``axhline`` spans the axes in x, wherever the data lie."""
    both = zip("xy", (x, y), transform.contains_branch_seperately(ax.transData), strict=True)
    return [_column(ax, name, values) for name, values, is_data in both if is_data]


def _column(ax: Any, which: str, values: Any, name: str = "") -> _Column:
    """A coordinate; on a linear axis, 1e-9 of its span is nothing, on another it may be much."""
    axis = getattr(ax, f"{which}axis")
    column = _own_column(name or which, values)
    low, high = axis.get_view_interval()
    column.floor = (
        max(column.floor, _NOISE * abs(high - low)) if axis.get_scale() == "linear" else 0.0
    )
    return column


def _own_column(name: str, values: Any) -> _Column:
    """Values without an axis: noise is relative to their own range."""
    import numpy as np

    flat = _floats(values).ravel()
    finite = flat[np.isfinite(flat)]
    return _Column(name, flat, _NOISE * float(np.ptp(finite)) if finite.size else 0.0)


def _floats(values: Any) -> numpy.ndarray:
    """As float64, with NaN for what is masked."""
    import numpy as np

    masked: Any = np.ma.asarray(values, dtype=np.float64)
    return np.ma.filled(masked, np.nan)


# The digest


def _digest(fig: Any, panels: list[Any], note: str | None) -> str:
    lines = [line for number, ax in enumerate(panels, 1) for line in _axes_lines(fig, ax, number)]
    if note:
        lines.append(f"note: {' '.join(note.split())}")
    return "\n".join(lines)


def _axes_lines(fig: Any, ax: Any, number: int) -> Iterator[str]:
    axes = [part for which in "xy" if (part := _axis_text(fig, ax, which))]
    title = ", ".join(filter(None, (ax.get_title(loc) for loc in ("left", "center", "right"))))
    yield "; ".join([_quoted(f"axes {number}", title), *axes])
    if not _is_colorbar(ax):  # a bar's own data are its ticks
        yield from (f"  {_entry(each)}" for each in _drawn(ax))
    if texts := [text.get_text() for text in ax.texts if text.get_visible() and text.get_text()]:
        yield "  texts: " + ", ".join(f'"{" ".join(text.split())}"' for text in texts)


def _axis_text(fig: Any, ax: Any, which: str) -> str:
    axis, label = getattr(ax, f"{which}axis"), _axis_label(fig, ax, which)
    scale = "" if axis.get_scale() == "linear" else f" ({axis.get_scale()})"
    names = _categories(axis)
    if not (label or scale or names):
        return ""
    return (
        _quoted(which, " ".join(label.split()))
        + scale
        + (f" of {', '.join(names)}" if names else "")
    )


def _categories(axis: Any) -> list[str]:
    """Names in the place of numbers on an axis, drawn from categories or fixed by the caller."""
    from matplotlib.category import StrCategoryFormatter
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

    formatter = axis.get_major_formatter()
    if isinstance(formatter, StrCategoryFormatter) and axis.units is not None:
        return [str(name) for name in axis.units._mapping]
    named = isinstance(formatter, FixedFormatter | FuncFormatter)
    if not (named and isinstance(axis.get_major_locator(), FixedLocator)):
        return []
    return [name for label in axis.get_ticklabels() if (name := label.get_text())]


def _quoted(kind: str, label: str) -> str:
    return f'{kind} "{label}"' if label else kind


def _entry(each: _Drawn) -> str:
    count = max((column.values.size for column in each.columns), default=0)
    parts = [f"{_quoted(each.kind, each.label)}: {count} {each.unit}{'s' * (count != 1)}"]
    parts += [f"{column.name} {_summary(column)}" for column in each.columns]
    return "; ".join(parts + _correlation(each))


def _summary(column: _Column) -> str:
    import numpy as np

    finite = column.values[np.isfinite(column.values)]
    odd = [(int(np.isnan(column.values).sum()), "NaN"), (int(np.isinf(column.values).sum()), "inf")]
    counts = "".join(f", {number} {name}" for number, name in odd if number)
    if not finite.size:
        return f"none{counts}"
    few = finite.size <= _LISTED
    chosen = finite if few else (finite.min(), finite.max(), finite.mean())
    shown = [_digits(value, column.floor, _significant(finite)) for value in chosen]
    return (", ".join(shown) if few else f"{shown[0]} to {shown[1]}, mean {shown[2]}") + counts


def _significant(finite: numpy.ndarray) -> int:
    """Three digits, or four for values whose range is under a tenth of their size, such as years.

    Not where the range is 1e-5 of the size or less: that may be noise of single precision.
    """
    size, spread = float(abs(finite).max()), float(finite.max() - finite.min())
    return 4 if 1e-5 * size < spread < 0.1 * size * (1 - _NOISE) else 3


def _digits(value: float, floor: float, significant: int) -> str:
    """Ties go away from zero, whatever noise they carry."""
    if abs(value) <= floor:
        return "0"
    return f"{float(f'{float(value) * (1 + _NOISE):.{significant - 1}e}'):g}"


def _correlation(each: _Drawn) -> list[str]:
    """Tells a shuffled series, which has the same extremes and mean, from the right one."""
    import numpy as np

    if len(each.columns) < 2 or not each.kind.endswith(("line", "lines", "scatter", "errorbars")):
        return []
    pair = [column.values for column in each.columns[:2]]
    if pair[0].size != pair[1].size:
        return []
    x, y = (values[np.isfinite(pair[0]) & np.isfinite(pair[1])] for values in pair)
    if x.size <= _LISTED or any(np.ptp(v) <= 1e-6 * np.abs(v).max() for v in (x, y)):
        return []  # listed in full, or constant up to noise
    return [f"r {_rounded(np.corrcoef(x, y)[0, 1])}"]


def _rounded(r: float) -> str:
    return f"{round(float(r) * (1 + _NOISE), 3) + 0.0:g}"


# The picture


def _thin_markers(ax: Any) -> None:
    for line in ax.lines:
        count, joined = len(line.get_xdata()), line.get_linestyle() not in _NO_LINE
        if joined and line.get_markevery() is None and count > 24:
            line.set_markevery(math.ceil(count / 10))


def _render(fig: Any, note: str | None) -> bytes:
    """The figure as a PNG in full colour, with the note in a strip of its own at the foot."""
    buffer = io.BytesIO()
    with _foot(fig, note):
        fig.savefig(
            buffer, format="png", dpi=DPI, facecolor="white", transparent=False, bbox_inches=None
        )
    return buffer.getvalue()


@contextmanager
def _foot(fig: Any, note: str | None) -> Iterator[None]:
    width, height = fig.get_size_inches()
    columns = int(width * 72 / (0.54 * _NOTE_POINTS))  # a glyph is about half the font size wide
    lines = textwrap.wrap(note or "", columns)
    strip = len(lines) * 1.35 * _NOTE_POINTS / 72 / height
    _lift(fig, strip)
    text = fig.text(
        0.01,
        0.25 * strip / max(1, len(lines)),
        "\n".join(lines),
        fontsize=_NOTE_POINTS,
        color="#444444",
        va="bottom",
        ha="left",
        in_layout=False,
    )
    try:
        yield
    finally:
        text.remove()


def _lift(fig: Any, strip: float) -> None:
    """Keep the axes out of the lowest ``strip`` of the figure, a fraction of its height."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = fig.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0, strip, 1, 1 - strip))  # left, bottom, width, height
    else:  # of pyplot; its colorbars can't change to the constrained layout any more
        fig.set_layout_engine("tight", rect=(0, strip, 1, 1))  # left, bottom, right, top


def _palette_png(png: bytes, digest: str) -> bytes:
    """The same picture with at most 256 colours, undithered: smaller, and the same every time.

    It carries a hash of the digest, so that a picture put beside another figure's text is found.
    """
    import hashlib

    from PIL import Image, PngImagePlugin

    with Image.open(io.BytesIO(png)) as image:
        # the median cut alone is off by up to 30 in a thin line over an image; means mend it, and
        # are good once an iteration moves fewer than 100 pixels
        small = image.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, kmeans=100)
    mark = PngImagePlugin.PngInfo()
    mark.add_text("digest", hashlib.sha256(digest.encode()).hexdigest()[:16])
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True, pnginfo=mark)
    return buffer.getvalue()


def _close(fig: Any) -> None:
    """Out of ``pyplot``'s list, so that no backend shows it again; nor can ``show``."""
    _shown.add(fig)
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(fig)
