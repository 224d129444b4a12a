from __future__ import annotations

import pytest
from hlo_texts import module

from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.loops import trip_count


def loop(
    compare: str = "compare(%iv, %limit), direction=LT",
    limit: int = 7,
    start: str = "constant(0)",
    step: str = "constant(1)",
    next_: str = "add(%iv.1, %step)",
) -> str:
    """A loop of (counter, bound) in the style of XLA:TPU; the bound is 5, and handed through."""
    computations = f"""%body (q: (s32[], s32[])) -> (s32[], s32[]) {{
  %q = (s32[], s32[]) parameter(0)
  %iv.1 = s32[] get-tuple-element(%q), index=0
  %bound.1 = s32[] get-tuple-element(%q), index=1
  %step = s32[] {step}
  %next = s32[] {next_}
  %copied = s32[] copy(%next)
  ROOT %out = (s32[], s32[]) tuple(%copied, %bound.1)
}}

%compare_fused (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}}

%condition (r: (s32[], s32[])) -> pred[] {{
  %r = (s32[], s32[]) parameter(0)
  %limit = s32[]{{:T(128)}} constant({limit})
  %iv = s32[] get-tuple-element(%r), index=0
  %bound = s32[] get-tuple-element(%r), index=1
  ROOT %go = pred[]{{:T(512)}} {compare}
}}

"""
    entry = f"""  %p = s32[] parameter(0)
  %zero = s32[] {start}
  %five = s32[] constant(5)
  %moved = s32[] copy(%zero)
  %init = (s32[], s32[]) tuple(%moved, %five)
  ROOT %while = (s32[], s32[]) while(%init), condition=%condition, body=%body"""
    return module(entry, computations)


def turns(text: str) -> int | None:
    parsed = parse(text)
    return trip_count(parsed, parsed.entry, parsed.entry.root)


def test_counts_up_to_a_constant() -> None:
    assert turns(loop()) == 7
    assert turns(loop(start="constant(3)")) == 4
    assert turns(loop(start="constant(9)")) == 0
    assert turns(loop(step="constant(3)")) == 3


def test_what_the_compiler_wrote_down_comes_first() -> None:
    text = loop().replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"2"}}')
    assert turns(text) == 2


@pytest.mark.parametrize(
    "compare, count",
    [
        ("compare(%iv, %limit), direction=LE", 8),
        ("compare(%limit, %iv), direction=GT", 7),
        ("compare(%limit, %iv), direction=GE", 8),
        ("compare(%iv, %bound), direction=LT", 5),
        ("fusion(%iv, %limit), kind=kLoop, calls=%compare_fused", 7),
    ],
)
def test_ways_to_compare(compare: str, count: int) -> None:
    assert turns(loop(compare)) == count


def test_counts_down() -> None:
    down = "compare(%iv, %limit), direction=GT"
    assert turns(loop(down, limit=-1, start="constant(6)", step="constant(-1)")) == 7
    down = "compare(%iv, %limit), direction=GE"
    assert turns(loop(down, limit=1, start="constant(6)", step="constant(-2)")) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"start": "copy(%p)"},  # starts from data
        {"compare": "compare(%iv, %iv), direction=LT"},
        {"compare": "compare(%bound, %limit), direction=LT"},  # of what does not change
        {"compare": "compare(%iv, %limit), direction=NE"},
        {"compare": "not(%iv)"},
        {"next_": "multiply(%iv.1, %step)"},
        {"next_": "add(%bound.1, %step)"},
        {"step": "constant(0)"},
        {"step": "constant(-1)"},  # away from the limit
        {"step": "get-tuple-element(%q), index=0"},
    ],
)
def test_no_count_can_be_read(options: dict[str, str]) -> None:
    assert turns(loop(**options)) is None


def test_no_count_where_the_bound_is_data() -> None:
    text = loop("compare(%iv, %bound), direction=LT").replace("%moved, %five", "%moved, %p")
    assert turns(text) is None
    text = loop("compare(%iv, %bound), direction=LT").replace("%copied, %bound.1", "%copied, %next")
    assert turns(text) is None


def test_a_nested_loop_that_starts_from_a_constant() -> None:
    text = loop()
    outer = text[text.index("ENTRY") :].replace("ENTRY %main", "%outer").replace("f32[8]", "s32[]")
    text = text.replace("ENTRY %main", outer.replace("%while", "%inner") + "\nENTRY %main")
    parsed = parse(text)
    inner = parsed.computations["outer"]
    assert trip_count(parsed, inner, inner.by_name["inner"]) == 7
