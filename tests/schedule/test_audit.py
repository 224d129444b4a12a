"""Findings in small handwritten modules: each kind, and what looks like it and is none."""

from __future__ import annotations

import pytest

from tbo_jax.schedule.audit import audit
from tbo_jax.schedule.hlo import parse

CACHE = "bf16[1025,64,512]"  # aliased: updated in place
STACKED = "bf16[4,2048,1024]"  # of four layers
WEIGHT = "bf16[2048,1024]"
META = ', metadata={op_name="jit(step)/here" source_file="tbo_jax/x.py" source_line=7}'
ALIAS = "input_output_alias={ {0}: (0, {}, may-alias) }"
DONOR = "buffer_donor={ (3, {}) }"


def module(lines: str, computations: str = "", header: str = ALIAS):
    return parse(
        f"HloModule jit_step, is_scheduled=true, {header}, num_partitions=1\n\n{computations}"
        f"ENTRY %main (c: {CACHE}, s: {STACKED}, i: s32[], w: {WEIGHT}) -> {CACHE} {{\n"
        f"  %c = {CACHE}{{2,1,0}} parameter(0)\n"
        f"  %s = {STACKED}{{2,1,0}} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        f"  %w = {WEIGHT}{{1,0}} parameter(3)\n"
        f"{lines}\n  ROOT %out = {CACHE}{{2,1,0}} bitcast(%c)\n}}\n"
    )


def fused(result: str, parameter: str, root: str) -> str:
    """A fused computation with one array and one index for parameters."""
    return (
        f"%fused (p0: {parameter}, p1: s32[]) -> {result} {{\n"
        f"  %p0 = {parameter} parameter(0)\n  %p1 = s32[] parameter(1)\n"
        f"  %zero = s32[] constant(0)\n{root}\n}}\n\n"
    )


def kinds(*args: str, **kwargs: str) -> list[str]:
    return [finding.kind for finding in audit(module(*args, **kwargs))]


def test_a_clean_step_has_no_findings() -> None:
    assert kinds(f"  %small = s32[8]{{0}} copy(%i){META}") == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f"  %copy.1 = {CACHE}{{0,1,2}} copy(%c){META}", "copy of the cache"),
        (f"  %t.1 = bf16[512,64,1025]{{2,1,0}} transpose(%c){META}", "copy of the cache"),
        (f"  %copy.1 = {WEIGHT}{{0,1}} copy(%w){META}", "copy of a weight"),
        (f"  %slice.1 = {WEIGHT}{{1,0}} dynamic-slice(%s, %i){META}", "weight slice materialised"),
        (f"  %pad.1 = bf16[2049,1024]{{1,0}} pad(%w, %i){META}", "padding of a large array"),
        (f"  %g.1 = bf16[64,64,512]{{2,1,0}} gather(%c, %i){META}",
         "pages gathered out of the cache"),
    ],
)  # fmt: skip
def test_kinds(line: str, kind: str) -> None:
    (finding,) = audit(module(line))
    assert finding.kind == kind
    assert finding.source == "tbo_jax/x.py:7"
    assert finding.op_name == "jit(step)/here"
    assert finding.instruction in line
    assert finding.bytes >= 1 << 20
    assert finding.instruction in str(finding) and "tbo_jax/x.py:7" in str(finding)


def test_training_updates_weights_in_place_and_has_no_cache() -> None:
    backward = META.replace("jit(step)/", "jit(step)/transpose(jvp(layer_1))/")
    gather = f"  %g.1 = bf16[64,64,512]{{2,1,0}} gather(%c, %i){backward}"
    copy = f"  %copy.1 = {CACHE}{{0,1,2}} copy(%c){META}"
    assert kinds(f"{gather}\n{copy}") == ["copy of a weight"]


def test_what_a_fusion_ends_in_counts() -> None:
    slices = fused(
        f"bf16[1,{WEIGHT[5:]}",
        STACKED,
        f"  %d = bf16[1,2048,1024] dynamic-slice(%p0, %p1, %zero, %zero)\n"
        f"  ROOT %b = {WEIGHT} bitcast(%d)",
    )
    line = f"  %f = {WEIGHT}{{1,0}} fusion(%s, %i), kind=kLoop, calls=%fused{META}"
    assert kinds(line, slices) == ["weight slice materialised"]


def test_a_slice_that_feeds_a_product_in_the_same_fusion_is_none() -> None:
    product = fused(
        "bf16[2048,1024]",
        STACKED,
        "  %d = bf16[2048,1024] dynamic-slice(%p0, %p1, %zero, %zero)\n"
        "  ROOT %n = bf16[2048,1024] negate(%d)",
    )
    line = f"  %f = {WEIGHT}{{1,0}} fusion(%s, %i), kind=kLoop, calls=%fused{META}"
    assert kinds(line, product) == []


def test_a_gather_inside_a_fusion_counts_if_it_takes_pages() -> None:
    gathers = fused(
        "bf16[64,64,512]",
        CACHE,
        f"  %b = {CACHE} bitcast(%p0)\n  %g = bf16[64,64,512] gather(%b, %p1)\n"
        "  ROOT %n = bf16[64,64,512] negate(%g)",
    )
    line = "  %f = bf16[64,64,512]{2,1,0} fusion(%c, %i), kind=kLoop, calls=%fused"
    assert kinds(line, gathers) == ["pages gathered out of the cache"]


def test_prefetch_into_fast_memory_is_no_copy() -> None:
    line = f"  %p = ({WEIGHT}{{1,0:S(1)}}, {WEIGHT}{{1,0}}, u32[]) copy-start(%w)"
    assert kinds(line) == []
    line = f"  %p = ({WEIGHT}{{1,0}}, {WEIGHT}{{1,0}}, u32[]) copy-start(%w)"
    assert kinds(line) == ["copy of a weight"]


def test_bodies_of_loops_are_looked_through() -> None:
    body = (
        f"%body (t: ({CACHE}, s32[])) -> ({CACHE}, s32[]) {{\n"
        f"  %t = ({CACHE}, s32[]) parameter(0)\n"
        f"  %g = {CACHE} get-tuple-element(%t), index=0\n"
        f"  %copy.9 = {CACHE}{{0,1,2}} copy(%g)\n"
        f"  ROOT %r = ({CACHE}, s32[]) tuple(%copy.9, %t)\n}}\n\n"
    )
    line = f"  %l = ({CACHE}, s32[]) while(%c), condition=%cond, body=%body"
    assert kinds(line, body) == ["copy of the cache"]


def test_a_donated_parameter_that_is_not_updated_in_place() -> None:
    assert kinds("", header=f"{ALIAS}, {DONOR}") == ["donated, but not updated in place"]
