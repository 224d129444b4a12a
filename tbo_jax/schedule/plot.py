"""Draw modelled timelines, one above the other: a compute lane and a link lane each.

Colours are micro-batches, boxes are stages. Where compute stands still for the link, both lanes are
hatched in red. Needs matplotlib: `pip install 'tbo-jax[plot]'`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tbo_jax.schedule.colours import EXPOSED, NO_SCOPE, colour_of
from tbo_jax.schedule.scopes import Scope, find_scope
from tbo_jax.schedule.timeline import Event, Lane, Timeline
from tbo_jax.schedule.trace import Span, middle_layers, short_name, stage_spans

_INK = "#222222"
_FONT = 7.5  # points, as all lengths here
_GLYPH = 0.57 * _FONT  # the mean width of a letter
_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT = 900.0, 56.0, 20.0, 44.0, 38.0  # the picture and its margins
_ROW, _AXES = 174.0, 146.0  # a timeline with its heading, and without
_LANES: dict[Lane, float] = {"compute": 75.0, "link": 3.0}  # feet of the lanes
_LANE = 68.0
_STYLE: Any = {
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": _FONT,
    "text.color": _INK,
    "text.parse_math": False,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "tbo_jax",
}


def check_path(path: str | Path) -> None:
    """Refuse what `plot` could not draw to, before long work.

    Raises:
        ValueError: the suffix is not .png or .svg, or the folder is not there.
        ImportError: matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"cannot draw {str(path)!r}: expected a name that ends in .png or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw {str(path)!r}: there is no folder {str(path.parent)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'tbo-jax[plot]'") from error


def plot(
    path: str | Path,
    timelines: Mapping[str, Timeline],
    *,
    title: str,
    window: Literal["layers", "step"] = "layers",
    times: str = "modelled time",
) -> None:
    """Draw timelines over one time axis, in the mapping's order, each under its key and its sums.

    Args:
        path: where to, .png or .svg. The same version of matplotlib draws the same bytes again.
        timelines: by name, such as "2 micro-batches (modelled)".
        title: of the picture.
        window: what to show of each. "layers": two layers near the middle, from the start of the
            first to the start of the third, or two turns of the loop over layers; all of it where
            no instruction has a scope of `run_layers`. "step": all of it.

    Raises:
        ValueError: a path as in `check_path`, no timelines, one without events, or another window.
        ImportError: matplotlib is not installed.
    """
    if window not in ("layers", "step"):
        raise ValueError(f"window {window!r}: expected 'layers' or 'step'")
    if not timelines or not all(timeline.events for timeline in timelines.values()):
        counts = {name: len(timeline.events) for name, timeline in timelines.items()}
        raise ValueError(f"expected timelines with events, got {counts}")
    check_path(path)
    import matplotlib
    from matplotlib.figure import Figure

    views = []
    for name, timeline in timelines.items():
        shown = middle_layers(timeline) if window == "layers" else None
        shown = shown or ("", 0.0, max(event.end for event in timeline.events))
        views.append(_View(name, timeline, *shown))
    height = _HEAD + _ROW * len(views) + _FOOT
    suffix = Path(path).suffix.lower()
    varying = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # instead of the user's style, which the context puts back
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=144, facecolor="white")
        _draw(figure, height, title, views, times)
        figure.savefig(path, format=suffix[1:], metadata=varying)


@dataclass(frozen=True)
class _View:
    """A timeline and what is shown of it, in seconds from its step's start."""

    name: str
    timeline: Timeline
    what: str
    start: float
    end: float


def _draw(figure: Any, height: float, title: str, views: Sequence[_View], times: str) -> None:
    length = max(view.end - view.start for view in views)
    left, right = _LEFT / _WIDTH, 1 - _RIGHT / _WIDTH
    figure.text(left, 1 - 15 / height, title, va="center", weight="bold", size=_FONT + 3)
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (left, 1 - 34 / height)}
    figure.legend(
        handles=_legend(views), ncols=10, frameon=False, borderpad=0, borderaxespad=0, **place
    )
    for row, view in enumerate(views):
        foot = _FOOT + _ROW * (len(views) - 1 - row)
        axes = figure.add_axes((left, foot / height, right - left, _AXES / height))
        axes.set(xlim=(0, length * 1e6), ylim=(0, _AXES), axisbelow=True)
        axes.set_yticks([foot + _LANE / 2 for foot in _LANES.values()], list(_LANES))
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelbottom=row == len(views) - 1)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
        _Row(axes, view, length).draw()
    axes.set_xlabel(f"{times}, microseconds")


def _legend(views: Sequence[_View]) -> list[Any]:
    from matplotlib.patches import Patch

    scopes = [find_scope(event.op_name) for view in views for event in view.timeline.events]
    numbers = sorted({scope.micro_batch for scope in scopes if scope is not None})
    patches = [Patch(color=colour_of(n), label=f"micro-batch {n}") for n in numbers]
    patches.append(Patch(color=NO_SCOPE, label="outside the stages"))
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": EXPOSED, "hatch": "/////"}
    return [*patches, Patch(**style, label="exposed: compute waits for the link")]


class _Row:
    """One timeline on its axes."""

    def __init__(self, axes: Any, view: _View, length: float):
        self.axes = axes
        self.view = view
        self.edge = view.start + length
        self.points = (_WIDTH - _LEFT - _RIGHT) / length  # per second

    def draw(self) -> None:
        self._heading()
        for span in stage_spans(self.view.timeline):
            self._stage("compute", span, span.scope)
        for event in self.view.timeline.events:
            if event.lane == "compute" and find_scope(event.op_name) is None:
                self._outside(event)
        transfers = {transfer.event: transfer for transfer in self.view.timeline.transfers}
        links = sorted((e for e in transfers if e.start < self.view.end), key=lambda e: e.start)
        free = [*(event.start for event in links[1:]), self.edge]  # up to where, after each
        for event, until in zip(links, free, strict=False):
            scope = find_scope(event.op_name)
            inside = self._stage("link", event, scope) if scope else self._outside(event)
            notes = [] if inside else [scope.label if scope else short_name(event)]
            waited = transfers[event].waited
            if waited and not self._exposed(event.end - waited, event.end):
                notes.append(f"exposed {_time(waited)}")
            self._note(event.end, until, notes)

    def _heading(self) -> None:
        timeline, view = self.view.timeline, self.view
        share = timeline.exposed / timeline.communication if timeline.communication else 0.0
        sums = (
            f"whole step {_time(timeline.step)}, communication {_time(timeline.communication)}, "
            f"exposed {_time(timeline.exposed)} ({share:.0%})"
        )
        if view.what:
            sums = f"{view.what}: {_time(view.end - view.start)};  {sums}"
        style: dict[str, Any] = {"transform": self.axes.transAxes, "va": "bottom"}
        self.axes.text(0, 1.02, view.name, weight="bold", size=_FONT + 1, **style)
        self.axes.text(1, 1.02, sums, ha="right", **style)

    def _stage(self, lane: Lane, extent: Span | Event, scope: Scope) -> bool:
        start, end = extent.start, extent.end
        self._box(lane, start, end, color=colour_of(scope.micro_batch), linewidth=0)
        self._box(lane, start, end, edgecolor=_INK, facecolor="none", linewidth=0.6, zorder=2)
        layer = "" if scope.index is None else f"layer {scope.index}"
        wrapped = scope.label.replace("_and_", "\nand_")
        texts = [f"{scope.label}{between}{layer}" for between in (", ", "\n") if layer]
        return self._label(lane, start, end, [*texts, scope.label, f"{wrapped}\n{layer}", wrapped])

    def _outside(self, event: Event) -> bool:
        self._box(event.lane, event.start, event.end, color=NO_SCOPE, linewidth=0)
        return self._label(event.lane, event.start, event.end, [short_name(event)])

    def _exposed(self, start: float, end: float) -> bool:
        edge: dict[str, Any] = {"edgecolor": EXPOSED, "linewidth": 1.1, "zorder": 2.5}
        self._box("compute", start, end, facecolor="white", hatch="/////", **edge)
        self._box("link", start, end, facecolor="none", **edge)
        texts = [f"exposed{between}{_time(end - start)}" for between in (" ", "\n")]
        style = {"color": EXPOSED, "bbox": {"color": "white", "pad": 0.8}}
        return self._label("compute", start, end, texts, **style)

    def _box(self, lane: Lane, start: float, end: float, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        start, end = max(start, self.view.start), min(end, self.view.end)
        if start < end:
            corner = ((start - self.view.start) * 1e6, _LANES[lane])
            self.axes.add_patch(Rectangle(corner, (end - start) * 1e6, _LANE, **style))

    def _label(
        self, lane: Lane, start: float, end: float, texts: Sequence[str], **style: Any
    ) -> bool:
        """Write the first text that fits along the lane, or else across it; whether one does."""
        start, end = max(start, self.view.start), min(end, self.view.end)
        room = (end - start) * self.points
        along = [text for text in texts if _width(text) <= room - 6]
        across = [text for text in texts if "\n" not in text and _width(text) <= _LANE - 3]
        if not along and (not across or room < _FONT + 1.5):
            return False
        style |= {"rotation": 0 if along else 90, "ha": "center"}
        self._write((start + end) / 2, lane, (along or across)[0], **style)
        return True

    def _note(self, start: float, end: float, lines: Sequence[str]) -> None:
        """Write on the link lane, right of a too narrow box, what there is room for."""
        room = (end - start) * self.points
        fitting = [line for line in lines if _width(line) <= room - 6]
        if fitting and self.view.start < start <= self.view.end:
            colour = EXPOSED if "exposed" in fitting[-1] else _INK
            self._write(start + 3 / self.points, "link", "\n".join(fitting), color=colour)

    def _write(self, when: float, lane: Lane, text: str, **style: Any) -> None:
        middle = _LANES[lane] + _LANE / 2
        self.axes.text((when - self.view.start) * 1e6, middle, text, va="center", **style)


def _width(text: str) -> float:
    return _GLYPH * max(map(len, text.split("\n")))


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.9995e-3 else f"{seconds * 1e3:.1f} ms"
