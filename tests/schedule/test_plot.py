from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tbo_jax.schedule.plot import check_path, plot
from tbo_jax.schedule.timeline import Event, Timeline, Transfer

US = 1e-6


def step(micro_batches: int, layers: int = 4, link: float = 400.0) -> Timeline:
    """Attention (1,000 us), then a dispatch: waited for with one micro-batch, hidden with two."""
    timeline = Timeline()
    now = 0.0
    for layer in range(layers):
        for micro_batch in range(micro_batches):
            scope = f"jit(step)/layer_{layer}/micro_batch_{micro_batch}"
            compute = Event(
                "compute", "gemm", f"{scope}/attend/dot_general", "", now, now + 1000 * US
            )
            now = compute.end
            event = Event("link", "a2a", f"{scope}/dispatch/all_to_all", "", now, now + link * US)
            waited = link * US if micro_batches == 1 else 0.0
            now += waited
            timeline.events += [compute, event]
            timeline.transfers.append(Transfer(event, 1e6, waited, 0.0, (), False, 0.0))
    timeline.events.append(Event("compute", "logits_of_all", "", "", now, now + 900 * US))
    timeline.step = now + 900 * US
    return timeline


def texts(svg: Path) -> list[str]:
    return [
        text.strip() for text in re.findall(r"<text[^>]*>([^<]*)<", svg.read_text(encoding="utf-8"))
    ]


def drawn(tmp_path: Path, timelines: dict[str, Timeline], **options: Any) -> list[str]:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    plot(path, timelines, title="Decode, $8 a device, $2 more", **options)
    return texts(path)


def test_what_is_drawn_is_labelled(tmp_path: Path) -> None:
    found = drawn(tmp_path, {"1 micro-batch": step(1), "2 micro-batches": step(2)})
    assert "modelled time, microseconds" in found
    assert {"Decode, $8 a device, $2 more", "1 micro-batch", "2 micro-batches"} <= set(found)
    assert {"micro-batch 0", "micro-batch 1", "exposed: compute waits for the link"} <= set(found)
    assert found.count("compute") == found.count("link") == 2
    assert (
        "layers 1 and 2: 2.8 ms;  whole step 6.5 ms, communication 1.6 ms, exposed 1.6 ms (100%)"
        in found
    )
    assert (
        "layers 1 and 2: 4.0 ms;  whole step 8.9 ms, communication 3.2 ms, exposed 0 µs (0%)"
        in found
    )


def test_the_default_window_is_two_layers_and_exposed_time_is_named(tmp_path: Path) -> None:
    found = drawn(tmp_path, {"1 micro-batch": step(1)})
    assert [t for t in found if t.startswith("attend")] == ["attend, layer 1", "attend, layer 2"]
    assert found.count("exposed 400 µs") == 2
    assert "logits_of_all" not in found


def test_the_whole_step_is_drawn_on_demand(tmp_path: Path) -> None:
    found = drawn(tmp_path, {"1 micro-batch": step(1)}, window="step")
    assert [t for t in found if t.startswith("attend")] == [f"attend, layer {i}" for i in range(4)]
    assert "logits_of_all" in found


def test_without_scopes_the_whole_step_is_drawn(tmp_path: Path) -> None:
    events = [
        Event("compute", name, "jit(f)/add", "", i * US, (i + 1) * US)
        for i, name in enumerate("abc")
    ]
    assert {"a", "b", "c"} <= set(drawn(tmp_path, {"mine": Timeline(events, [], 3 * US)}))


def test_a_label_that_does_not_fit_stands_beside_its_box(tmp_path: Path) -> None:
    found = drawn(tmp_path, {"1 micro-batch": step(1, link=10.0)})
    (first, *_) = [i for i, text in enumerate(found) if text == "dispatch"]
    assert found[first + 1] == "exposed 10 µs"


def test_a_crowded_picture_leaves_labels_out(tmp_path: Path) -> None:
    found = drawn(tmp_path, {"1 micro-batch": step(1, layers=200)}, window="step")
    assert not {"attend", "dispatch", "exposed 400 µs"} & set(found)


def test_a_merged_stage_is_one_box(tmp_path: Path) -> None:
    scope = "jit(step)/layer_0/micro_batch_0/attend"
    edges = [0, 300, 310, 700, 1000]
    events = [
        Event("compute", f"i{i}", "" if i == 1 else f"{scope}/op{i}", "", a * US, b * US)
        for i, (a, b) in enumerate(pairwise(edges))
    ]
    assert drawn(tmp_path, {"1": Timeline(events, [], 1e-3)}).count("attend, layer 0") == 1


def test_an_svg_is_drawn_the_same_again_whatever_the_style(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    timelines = {"1 micro-batch": step(1), "2 micro-batches": step(2)}
    plot(tmp_path / "a.svg", timelines, title="Same")
    with matplotlib.rc_context(
        {"font.size": 20, "svg.fonttype": "path", "axes.facecolor": "black"}
    ):
        before = dict(matplotlib.rcParams)
        plot(tmp_path / "b.svg", timelines, title="Same")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()


def test_a_png_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "a.PNG", {"2 micro-batches": step(2)}, title="A picture")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["a.pdf", "a", "svg", "a.svg.gz"])
def test_another_suffix_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}'.*\.png or \.svg"):
        plot(tmp_path / name, {"1 micro-batch": step(1)}, title="A picture")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder .*missing"):
        check_path(tmp_path / "missing" / "a.svg")


@pytest.mark.parametrize("module", ["matplotlib", "matplotlib.figure"])
def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'tbo-jax\[plot\]'"):
        plot(tmp_path / "a.svg", {"1 micro-batch": step(1)}, title="A picture")


@pytest.mark.parametrize("timelines", [{}, {"mine": Timeline()}])
def test_nothing_to_draw_is_refused(tmp_path: Path, timelines: dict[str, Timeline]) -> None:
    with pytest.raises(ValueError, match="expected timelines with events, got {.*}"):
        plot(tmp_path / "a.svg", timelines, title="A picture")


def test_another_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="window 'all': expected 'layers' or 'step'"):
        plot(tmp_path / "a.svg", {"1": step(1)}, title="A picture", window="all")  # type: ignore[arg-type]
