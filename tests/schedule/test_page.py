"""The page: what it holds, and what it does in a browser where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tbo_jax.schedule import Finding, ScheduleReport, find_target
from tbo_jax.schedule.__main__ import Arguments, as_json, run, setting_of, write_files
from tbo_jax.schedule.page import facts_of, write_page
from tbo_jax.schedule.timeline import Event, Timeline
from tests.schedule.browser import Browser, find_chromium
from tests.schedule.test_report import of_fixture

US = 1e-6
HOSTILE = "</script><script>window.harm = 1</script><img src=x onerror='window.harm = 2'>&\u2028\""


class Reader(HTMLParser):
    """What a page holds: its texts, its tags with their attributes, and its data."""

    def __init__(self, page: str):
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"type": "application/json", "id": "data"}):
            self.data = self.data or json.loads(data)
        elif data.strip():
            self.texts.append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@cache
def unrolled() -> ScheduleReport:
    return of_fixture("gpu_unrolled")


def two_reports() -> list[ScheduleReport]:
    """A step with one micro-batch that is longer, and one with two that has findings."""
    two = unrolled()
    copied = next(e for e in two.timeline.events if e.lane == "compute" and e.start > two.step / 2)
    findings = (
        Finding("copy of a weight", copied.name, 3 << 20, copied.op_name, "models/decoder.py:7"),
        Finding("donated, but not updated in place", "param.9", 2 << 20, "", "models/cache.py:8"),
    )
    return [
        replace(two, micro_batches=1, step=2 * two.step, findings=()),
        replace(two, findings=findings),
    ]


def hostile_report() -> ScheduleReport:
    event = Event("compute", HOSTILE, f"jit(f)/{HOSTILE}/add", HOSTILE, 0.0, 5 * US)
    finding = Finding(HOSTILE, HOSTILE, 1 << 20, HOSTILE, HOSTILE)
    return replace(
        unrolled(),
        step=5 * US,
        timeline=Timeline([event], [], 5 * US),
        collectives=(),
        findings=(finding,),
        assumed_loops=(HOSTILE,),
    )


def written(tmp_path: Path, reports: list[ScheduleReport], **more: Any) -> Reader:
    path = tmp_path / "page.html"
    write_page(path, "Prefill of a model", reports, **more)
    return Reader(path.read_text(encoding="utf-8"))


def test_the_figures_are_those_of_the_reports(tmp_path: Path) -> None:
    reports = two_reports()
    page = written(tmp_path, reports, facts={"transport": "all_to_all"})
    assert "Prefill of a model" in page.texts
    at = page.texts.index("transport")
    assert page.texts[at + 1] == "all_to_all"
    one, two = reports
    for name, cells in {
        "step": [f"{r.step * 1e3:.3f} ms" for r in reports],
        "communication": [f"{r.communication * 1e3:.3f} ms" for r in reports],
        "hidden": [f"{r.hidden_share:.1%}" for r in reports],
        "exposed": [f"{r.exposed * 1e3:.3f} ms" for r in reports],
        "speed-up over 1 micro-batch": ["1.000", f"{one.step / two.step:.3f}"],
        "findings": ["0", "2"],
    }.items():
        at = page.texts.index(name)
        assert page.texts[at + 1 : at + 3] == cells


def test_left_out_layers_are_extrapolated_as_in_the_table(tmp_path: Path) -> None:
    report = replace(unrolled(), layer_bytes=1 << 40)
    page = written(tmp_path, [report], layers_left_out=40)
    assert any(t.startswith("does not fit: ") and "with all layers" in t for t in page.texts)


def test_every_event_is_drawn_with_what_is_said_of_it(tmp_path: Path) -> None:
    report = two_reports()[1]
    (program,) = written(tmp_path, [report]).data["programs"]
    events = report.timeline.events
    lanes = program["lanes"]
    assert len(lanes["compute"]) == sum(e.lane == "compute" for e in events)
    assert len(lanes["link"]) == len(report.timeline.transfers)
    last = report.timeline.transfers[-1]
    start, end, kind, said = lanes["link"][-1]
    assert (start, end) == pytest.approx((last.event.start / US, last.event.end / US), abs=1e-3)
    of_last = program["kinds"][kind]
    assert of_last["instruction"] == last.event.name and of_last["source"] == last.event.source
    assert of_last["scope"] == "layer_1/micro_batch_1/combine"
    assert said["sent"] == f"{last.bytes / 1e6:.1f} MB"
    assert said["exposed"] == pytest.approx(last.waited / US, abs=1e-3)
    assert said["hidden"] + said["exposed"] == pytest.approx(end - start, abs=2e-3)
    assert said["reason"] == report.collectives[-1].reason != ""
    first = lanes["link"][0][3]
    assert first["exposed"] == 0 and first["reason"] == ""
    beside = report.timeline.transfers[0].beside
    assert [name for name, _ in first["beside"]] == [name for name, _ in beside[:6]]
    assert first["more"] == len(beside) - 6 > 0


def test_micro_batches_have_the_colours_of_the_picture(tmp_path: Path) -> None:
    page = written(tmp_path, two_reports())
    kinds = page.data["programs"][0]["kinds"]
    colours = {kind["scope"].split("/")[1]: kind["colour"] for kind in kinds if kind["scope"]}
    assert colours == {"micro_batch_0": "#9ecae9", "micro_batch_1": "#ffc685"}
    assert {"#9ecae9", "#ffc685", "#d4d4d4"} <= {rect["fill"] for rect in page.of("rect")}
    assert {"micro-batch 0", "micro-batch 1", "outside the stages"} <= set(page.texts)


def test_findings_lead_to_their_event_if_they_have_one(tmp_path: Path) -> None:
    report = two_reports()[1]
    page = written(tmp_path, [report])
    jumps = [button for button in page.of("button") if button.get("class") == "jump"]
    assert len(jumps) == 1 + len(report.collectives)
    assert jumps[0]["data-lane"] == "compute"
    program = page.data["programs"][0]
    _, _, kind = program["lanes"]["compute"][int(jumps[0]["data-number"] or "")]
    assert program["kinds"][kind]["instruction"] == report.findings[0].instruction
    assert {"models/decoder.py:7", "models/cache.py:8", "param.9"} <= set(page.texts)
    assert "(takes no time of its own)" in page.texts


def test_a_collective_of_a_loop_leads_to_its_longest_wait(tmp_path: Path) -> None:
    report = of_fixture("gpu_scanned")
    link = [e for e in report.timeline.events if e.lane == "link"]
    waited = {t.event: t for t in report.timeline.transfers}
    number, looped = next((i, c) for i, c in enumerate(report.collectives) if c.turns == 2)
    turns = [i for i, e in enumerate(link) if e.name == looped.name]
    waited[link[turns[1]]] = replace(waited[link[turns[1]]], waited=5 * US)
    report.timeline.transfers[:] = waited.values()
    collectives = [replace(c, reason="busy") if c == looped else c for c in report.collectives]
    report = replace(report, collectives=tuple(collectives))
    page = written(tmp_path, [report])
    jumps = [button for button in page.of("button") if button.get("data-lane") == "link"]
    assert jumps[number]["data-number"] == str(turns[1])
    drawn = page.data["programs"][0]["lanes"]["link"]
    assert [drawn[i][3]["reason"] for i in turns] == ["", "in its last turn: busy"]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "A page", two_reports(), {"config": "a"})
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.findall(r"https?:|\b(?:src|href)\s*=|url\(|@import|import\(|fetch\(", page)
    policy = next(m["content"] for m in Reader(page).of("meta") if "http-equiv" in m) or ""
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_names_cannot_break_out(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, HOSTILE, [hostile_report()], {HOSTILE: HOSTILE})
    page = Reader(path.read_text(encoding="utf-8"))
    assert len(page.of("script")) == 2 and not page.of("img")
    kinds = page.data["programs"][0]["kinds"]
    assert [kind["instruction"] for kind in kinds] == [HOSTILE]
    assert page.texts.count(HOSTILE) >= 4


@pytest.mark.parametrize("events", [[], [0]])
def test_nothing_to_show_is_refused(tmp_path: Path, events: list[int]) -> None:
    reports = [replace(unrolled(), timeline=Timeline()) for _ in events]
    with pytest.raises(ValueError, match=re.escape(f"with events, got {events} events")):
        write_page(tmp_path / "page.html", "A page", reports)
    assert not list(tmp_path.iterdir())


def test_facts_are_the_setting_the_rates_and_the_versions() -> None:
    args = Arguments(phase="prefill", tokens=512)
    target = find_target("h100x8", rates="line")
    facts = facts_of(as_json("", setting_of(args, target, 4), target, []), target)
    assert facts["phase"] == "prefill" and facts["tokens"] == "512" and facts["layers"] == "4"
    assert facts["transport"] == "all_to_all" and facts["target"] == "h100x8"
    assert facts["prices"] == "989 TFLOP/s, 3352 GB/s of memory and 450 GB/s of link a device"
    assert re.fullmatch(r"tbo_jax \S+, jax \S+, jaxlib \S+", facts["versions"])
    target = find_target("h100x8", nodes=2, node_link_gbps=45)
    facts = facts_of(as_json("", setting_of(args, target, 4), target, []), target)
    assert facts["prices"].endswith("of link a device in a node, 45 between nodes")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    args = Arguments(html=tmp_path / "page.html")
    reports, target = two_reports(), find_target("h100x8")
    values = as_json("", setting_of(args, target, 2), target, reports)
    write_files(args, "A title", values, target, reports)
    page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert {"A title", "decode", "256", "of all layers, extrapolated"} <= set(page.texts)


def test_a_folder_that_is_not_there_is_refused_before_compiling(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--html .*page.html: .*missing is no folder"):
        run(Arguments(html=tmp_path / "missing" / "page.html", quiet=True))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    browser = Browser(path, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def tab(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """A tab with the page of two programs; in the end nothing was logged and nothing fetched."""
    path = tmp_path / "page.html"
    write_page(path, "Two programs", two_reports())
    yield from opened(chromium, path)


@pytest.fixture
def hostile_tab(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    path = tmp_path / "page.html"
    write_page(path, HOSTILE, [hostile_report()], {HOSTILE: HOSTILE})
    yield from opened(chromium, path)


@pytest.fixture
def long_tab(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """20,000 kernels of a microsecond."""
    starts = range(20_000)
    events = [Event("compute", f"fusion.{i}", "", "", i * US, (i + 1) * US) for i in starts]
    timeline = Timeline(events, [], 20_000 * US)
    report = replace(unrolled(), step=timeline.step, timeline=timeline, collectives=(), findings=())
    path = tmp_path / "page.html"
    write_page(path, "A long step", [report])
    yield from opened(chromium, path)


def opened(browser: Browser, path: Path) -> Iterator[Browser]:
    browser.call("Emulation.setEmulatedMedia", features=[])
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path)
    browser.wait_for("document.getElementById('range').value")
    yield browser
    settle(browser)
    assert browser.errors == []
    assert browser.requests == [path.as_uri()]


def settle(tab: Browser) -> None:
    """Wait until what was asked for is drawn."""
    tab.wait_for("!waiting")


def shown(tab: Browser) -> tuple[float, float]:
    """The visible range as the page says it, in microseconds."""
    settle(tab)
    text = tab.value("document.getElementById('range').value")
    start, end = re.findall(r"([\d.]+) (µs|ms)", text)
    return tuple(float(n) * {"µs": 1, "ms": 1000}[unit] for n, unit in (start, end))  # type: ignore[return-value]


def point(tab: Browser, program: int, lane: str, number: int) -> tuple[float, float]:
    """Where the middle of an event is."""
    settle(tab)
    x, y = tab.value(f"""(() => {{
        const event = rowOf({program}, "{lane}").events[{number}];
        const place = canvas.getBoundingClientRect();
        return [place.left + xOf((event.start + event.end) / 2), place.top + event.row.top + 10];
    }})()""")
    return round(x), y  # a page sees whole pixels


def tip(tab: Browser) -> dict[str, str] | None:
    """What the tip says, by term; None if it is hidden."""
    settle(tab)
    if tab.value("tip.hidden"):
        return None
    pairs = "[...tip.querySelectorAll('dt')].map((t) => [t.innerText, t.nextSibling.innerText])"
    return dict(tab.value(pairs)) | {"label": tab.value("tip.querySelector('strong').innerText")}


def test_lanes_start_as_the_whole_step_and_zoom_and_pan(tab: Browser) -> None:
    whole = two_reports()[0].step / US
    assert shown(tab) == pytest.approx((0, whole), rel=2e-3)
    names = [r["lane"] for r in tab.value("rows.map(({program, lane}) => ({program, lane}))")]
    assert names == ["stages", "compute", "link"] * 2
    x, y = point(tab, 1, "compute", 5)
    at = tab.value(f"timeAt({x} - canvas.getBoundingClientRect().left)")
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    start, end = shown(tab)
    assert 0 <= start <= at <= end and end - start < whole / 3
    assert tab.value(f"timeAt({x} - canvas.getBoundingClientRect().left)") == pytest.approx(at)
    tab.mouse("mousePressed", 800, y, button="left", buttons=1, clickCount=1)
    tab.mouse("mouseMoved", 700, y, button="left", buttons=1)
    tab.mouse("mouseReleased", 700, y, button="left", clickCount=1)
    later, until = shown(tab)
    assert later > start and until - later == pytest.approx(end - start, rel=0.01)
    assert tip(tab) is None  # a drag is no click
    tab.value("document.querySelector('[data-do=all]').click()")
    assert shown(tab) == pytest.approx((0, whole), rel=2e-3)
    tab.value("document.querySelector('[data-do=in]').click()")
    start, end = shown(tab)
    assert end - start == pytest.approx(whole / 2, rel=0.01)


def test_hovering_says_what_an_event_is(tab: Browser) -> None:
    report = two_reports()[1]
    last = report.timeline.transfers[-1]
    number = len(report.timeline.transfers) - 1
    tab.mouse("mouseMoved", *point(tab, 1, "link", number))
    found = tip(tab)
    assert found is not None
    assert found["instruction"] == last.event.name
    assert found["scope"] == "layer_1/micro_batch_1/combine"
    assert found["sent"] == f"{last.bytes / 1e6:.1f} MB"
    assert found["kind"] == "all-to-all" and found["source"] == last.event.source
    assert found["reason"] == report.collectives[-1].reason
    for term, seconds in {"start": last.event.start, "duration": last.event.seconds,
                          "exposed": last.waited, "hidden": last.hidden}.items():  # fmt: skip
        value, unit = found[term].split()
        assert unit == "µs" and float(value) == pytest.approx(seconds / US, rel=2e-3, abs=2e-3)
    assert not tab.value("tip.classList.contains('pinned')")
    box = "(({top, bottom}) => [top, bottom])(tip.getBoundingClientRect())"
    top, bottom = tab.value(box)
    assert 0 <= top < bottom < point(tab, 1, "link", number)[1]  # below is no room in the window
    x, y = point(tab, 1, "link", number)
    above = tab.value("rowOf(1, 'compute').top - rowOf(1, 'link').top")
    tab.mouse("mouseMoved", x, y + above)  # where compute waits for it
    assert tip(tab) == found
    tab.mouse("mouseMoved", 3, 3)
    assert tip(tab) is None


def test_a_finding_leads_to_its_event(tab: Browser) -> None:
    report = two_reports()[1]
    event = next(e for e in report.timeline.events if e.name == report.findings[0].instruction)
    tab.value("document.querySelector('ul .jump').scrollIntoView()")
    box = tab.value(
        "(({x, y}) => [x, y])(document.querySelector('ul .jump').getBoundingClientRect())"
    )
    tab.click(box[0] + 5, box[1] + 5)
    found = tip(tab)
    assert found is not None and found["instruction"] == event.name
    assert tab.value("tip.classList.contains('pinned')")
    start, end = shown(tab)
    assert start <= event.start / US <= event.end / US <= end < report.step / US
    assert tab.value("document.activeElement.id") == "canvas"
    tab.press("Escape")
    assert tip(tab) is None


def test_a_collective_leads_to_its_event(tab: Browser) -> None:
    first = two_reports()[1].collectives[0]
    tab.value("document.querySelector('table .jump').click()")
    found = tip(tab)
    assert found is not None and found["instruction"] == first.name
    assert found["exposed"] == "0 µs" and "reason" not in found
    assert found["beside it"].startswith(first.beside[0][0])
    assert found["beside it"].endswith(f"{len(first.beside) - 6} more")


def test_a_click_pins_until_another(tab: Browser) -> None:
    x, y = point(tab, 0, "stages", 1)
    tab.click(x, y)
    pinned = tip(tab)
    assert pinned is not None and pinned["label"] == "attend_and_route, layer 0"
    tab.mouse("mouseMoved", *point(tab, 0, "link", 0))
    assert tip(tab) == pinned
    tab.click(*point(tab, 0, "link", 0))
    found = tip(tab)
    assert found is not None and found["kind"] == "all-to-all"
    assert tab.value("tip.getBoundingClientRect().top") > point(tab, 0, "link", 0)[1]


def test_keys_walk_along_the_lanes(tab: Browser) -> None:
    tab.value("canvas.focus()")
    tab.press("ArrowRight")
    assert tab.value("[pinned.row.lane, pinned.row.events.indexOf(pinned)]") == ["stages", 0]
    tab.press("ArrowRight")
    assert tab.value("[pinned.row.lane, pinned.row.events.indexOf(pinned)]") == ["stages", 1]
    tab.press("ArrowDown")
    assert tab.value("pinned.row.lane") == "compute"
    assert tab.value("pinned.end > rowOf(0, 'stages').events[1].start")
    tab.press("Enter")
    start, end = shown(tab)
    assert start <= tab.value("pinned.start") <= tab.value("pinned.end") <= end
    tab.press("-")
    wider = shown(tab)
    assert wider[1] - wider[0] > 1.5 * (end - start)
    tab.press("ArrowRight", shift=True)
    assert shown(tab)[0] > wider[0]
    tab.press("Home")
    assert shown(tab)[0] == 0
    found = tip(tab)
    assert found is not None and found["instruction"]


def test_hostile_names_stay_text(hostile_tab: Browser) -> None:
    hostile_tab.value("document.querySelector('.jump').click()")
    found = tip(hostile_tab)
    assert found is not None and found["instruction"] == hostile_tab.value(
        "document.querySelector('.jump').innerText"
    )
    assert "onerror=" in found["instruction"]
    assert hostile_tab.value("typeof window.harm") == "undefined"
    assert hostile_tab.value("document.querySelectorAll('img').length") == 0


def test_a_long_step_is_drawn_with_a_box_for_each_pixel_at_most(long_tab: Browser) -> None:
    long_tab.value("""(() => {
        const fill = pen.fillRect;
        window.boxes = 0;
        pen.fillRect = (...box) => { window.boxes++; fill.apply(pen, box); };
        draw();
    })()""")
    width = long_tab.value("canvas.clientWidth")
    assert width / 2 < long_tab.value("window.boxes") < 1.2 * width
    long_tab.value("show(10000, 20); window.boxes = 0; draw();")
    assert 20 <= long_tab.value("window.boxes") < 100  # and not the others
    assert shown(long_tab) == pytest.approx((10_000, 10_020), abs=0.1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable(tab: Browser, scheme: str) -> None:
    def prefer(scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        tab.call("Emulation.setEmulatedMedia", features=[feature])

    prefer({"light": "dark", "dark": "light"}[scheme])
    tab.value("document.querySelector('table .jump').click()")
    settle(tab)
    tab.value("""(() => {
        const write = pen.fillText;
        pen.fillText = (text, ...place) => {
            if (text === headings[0].text) window.ink = pen.fillStyle;
            write.call(pen, text, ...place);
        };
    })()""")
    prefer(scheme)

    def brightness(element: str, colour: str) -> float:
        text = tab.value(f"getComputedStyle({element}).{colour}")
        return sum(float(n) for n in re.findall(r"[\d.]+", text)[:3]) / (3 * 255)

    for element, paper in {"tip": "tip", "document.querySelector('td:last-child')": "document.body",
                           "document.querySelector('.quiet')": "document.body"}.items():  # fmt: skip
        contrast = brightness(element, "color") - brightness(paper, "backgroundColor")
        assert (contrast > 0.4) if scheme == "dark" else (contrast < -0.4)
    ink = {"light": "#222222", "dark": "#e6e6e6"}[scheme]
    tab.wait_for(f"window.ink === '{ink}'")  # the canvas is drawn anew
