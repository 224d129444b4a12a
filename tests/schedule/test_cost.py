from __future__ import annotations

import pytest
from hlo_texts import ADD, GROUPS, module

from tbo_jax.schedule import cost
from tbo_jax.schedule.cost import Work
from tbo_jax.schedule.hlo import Instruction, Module, parse
from tbo_jax.schedule.links import NodeLinks
from tbo_jax.schedule.targets import Rates


def parsed(entry: str, computations: str = "") -> tuple[Module, Instruction]:
    text = parse(module(entry, computations))
    return text, text.entry.root


def work(entry: str, computations: str = "") -> Work:
    """Of the root of the entry computation."""
    text, root = parsed(entry, computations)
    return cost.work(text, text.entry, root)


def fusion_work(operands: list[str], result: str, body: str, more: str = "") -> Work:
    """Of a fusion of operands with these types; `body` has them as %a, %b, ..."""
    names = "abcdef"[: len(operands)]
    inner = [
        f"  %{n} = {type_} parameter({i})" for i, (n, type_) in enumerate(zip(names, operands))
    ]
    outer = [
        f"  %p{n} = {type_} parameter({i})" for i, (n, type_) in enumerate(zip(names, operands))
    ]
    computations = f"{more}%fused (a: f32[]) -> f32[] {{\n" + "\n".join([*inner, body]) + "\n}\n\n"
    arguments = ", ".join(f"%p{n}" for n in names)
    root = f"  ROOT %fusion = {result} fusion({arguments}), kind=kLoop, calls=%fused"
    return work("\n".join([*outer, root]), computations)


# --- Matrix products ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lhs, rhs, out, attributes, flops",
    [
        ("bf16[4,8]{1,0}", "bf16[8,3]{1,0}", "bf16[4,3]{1,0}",
         "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 4 * 3 * 8),
        ("bf16[5,4,8]{2,1,0}", "bf16[5,3,8]{2,1,0}", "bf16[5,4,3]{2,1,0}",
         "dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}",
         2 * 5 * 4 * 3 * 8),
        ("bf16[4,8,2]{2,1,0}", "bf16[8,2,3]{2,1,0}", "f32[4,3]{1,0}",
         "dot(%x, %y), lhs_contracting_dims={1,2}, rhs_contracting_dims={0,1}", 2 * 4 * 3 * 16),
        # As XLA:TPU writes them.
        ("bf16[128,2048]{1,0}", "bf16[512,2048]{1,0}", "bf16[128,512]{1,0}",
         "convolution(%x, %y), dim_labels=bf_oi->bf", 2 * 128 * 512 * 2048),
        ("bf16[6,4,8,128]{3,2,1,0}", "bf16[6,64,4,128]{3,2,1,0}", "f32[6,4,8,64]{3,2,1,0}",
         "convolution(%x, %y), window={size=6x4 stride=5x3 lhs_dilate=6x4}, dim_labels=01bf_0o1i->01bf",
         2 * 6 * 4 * 8 * 64 * 128),
        ("bf16[9,4,8]{2,1,0}", "bf16[4,8,3]{2,1,0}", "bf16[9,1,3]{2,1,0}",
         "convolution(%x, %y), window={size=4}, dim_labels=b0f_0io->b0f", 2 * 9 * 3 * 4 * 8),
        ("bf16[9,4,8]{2,1,0}", "bf16[3,8,5]{2,1,0}", "bf16[9,7,5]{2,1,0}",
         "convolution(%x, %y), window={size=3 pad=1_1 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
         2 * 9 * 7 * 5 * 3 * 8),
    ],
)  # fmt: skip
def test_flops_of_a_product(lhs: str, rhs: str, out: str, attributes: str, flops: int) -> None:
    entry = f"  %x = {lhs} parameter(0)\n  %y = {rhs} parameter(1)\n  ROOT %z = {out} {attributes}"
    text, root = parsed(entry)
    assert cost.matmul_flops(text.entry, root) == flops
    made = cost.work(text, text.entry, root)
    assert made == Work(flops, sum(i.bytes for i in text.entry.instructions), 1)


def test_a_product_of_cublas_has_scratch_memory_that_is_not_moved() -> None:
    made = work(
        """  %x = bf16[512,64]{1,0} parameter(0)
  %y = bf16[64,32]{1,0} parameter(1)
  ROOT %z = (bf16[512,32]{1,0}, s8[33554432]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}"""
    )
    assert made == Work(2 * 512 * 32 * 64, 2 * (512 * 64 + 64 * 32 + 512 * 32), 1)


def test_a_product_in_a_fusion_and_in_a_fusion_within() -> None:
    nested = """%inner (u: bf16[4,8], v: bf16[8,3]) -> bf16[4,3] {
  %u = bf16[4,8]{1,0} parameter(0)
  %v = bf16[8,3]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,3]{1,0} dot(%u, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
    body = """  %dot.2 = bf16[4,3]{1,0} fusion(%a, %b), kind=kOutput, calls=%inner
  %dot.3 = bf16[4,3]{1,0} dot(%dot.2, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = bf16[4,3]{1,0} add(%dot.2, %dot.3)"""
    made = fusion_work(
        ["bf16[4,8]{1,0}", "bf16[8,3]{1,0}", "bf16[3,3]{1,0}"], "bf16[4,3]{1,0}", body, nested
    )
    assert made == Work(2 * 4 * 3 * (8 + 3), 2 * (32 + 24 + 9 + 12), 1)


def test_what_a_kernel_says_of_itself() -> None:
    made = work(
        """  %x = f32[1024]{0} parameter(0)
  ROOT %z = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"1234","bytes_accessed":"64"}}}"""
    )
    assert made == Work(1234, 64, 1)


# --- Bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction, bytes_",
    [
        ("f32[64]{0} copy(%x)", 2 * 256),
        ("f32[128]{0} broadcast(%x), dimensions={0}", 256 + 512),
        ("f32[8]{0} slice(%x), slice={[0:8]}", 2 * 32),
        ("f32[8]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={8}", 2 * 32 + 4),
        ("f32[8]{0} gather(%x, %j)", 2 * 32 + 16),
        ("f32[64]{0} dynamic-update-slice(%x, %u, %i)", 2 * 32 + 4),
        ("f32[64]{0} scatter(%x, %j, %u), to_apply=%add", 2 * 32 + 16),
        ("f32[] reduce(%x, %i), dimensions={0}, to_apply=%add", 256 + 4 + 4),
    ],
)
def test_bytes_of_an_instruction(instruction: str, bytes_: int) -> None:
    entry = f"""  %x = f32[64]{{0}} parameter(0)
  %u = f32[8]{{0}} parameter(1)
  %i = s32[] parameter(2)
  %j = s32[4]{{0}} parameter(3)
  ROOT %z = {instruction}"""
    assert work(entry, ADD) == Work(0, bytes_, 1)


WEIGHTS, INDEX = "bf16[48,64,32]{2,1,0}", "s32[]"
SLICE = 64 * 32  # elements
LAYER = "bf16[1,64,32]{2,1,0}"
TAKE = "dynamic-slice({}, %b, %b, %b), dynamic_slice_sizes={{1,64,32}}"


def test_of_a_sliced_operand_the_slice_is_read() -> None:
    body = f"  ROOT %slice = {LAYER} {TAKE.format('%a')}"
    assert fusion_work([WEIGHTS, INDEX], LAYER, body).bytes == 2 * 2 * SLICE + 4


@pytest.mark.parametrize("between", ["bitcast", "copy", "convert", "reshape"])
def test_a_slice_behind_a_change_of_type_or_shape(between: str) -> None:
    dtype = "f32" if between == "convert" else "bf16"
    body = f"""  %same = {dtype}[48,64,32]{{2,1,0}} {between}(%a)
  ROOT %slice = {dtype}[1,64,32]{{2,1,0}} {TAKE.format("%same")}"""
    made = fusion_work([WEIGHTS, INDEX], f"{dtype}[1,64,32]{{2,1,0}}", body)
    assert made.bytes == 2 * SLICE + (4 if dtype == "f32" else 2) * SLICE + 4


def test_a_slice_in_a_fusion_within() -> None:
    """XLA:TPU: the layout is changed in one inner fusion, the slice is taken in another."""
    nested = f"""%relayout (u: bf16[48,64,32]) -> bf16[48,64,32] {{
  %u = {WEIGHTS} parameter(0)
  ROOT %copied = bf16[48,64,32]{{2,1,0:T(8,128)(2,1)}} copy(%u)
}}

%inner (v: bf16[48,64,32], b: s32[]) -> bf16[64,32] {{
  %v = {WEIGHTS} parameter(0)
  %b = s32[] parameter(1)
  %whole = {WEIGHTS} fusion(%v), kind=kLoop, calls=%relayout
  %slice = {LAYER} {TAKE.format("%whole")}
  ROOT %flat = bf16[64,32]{{1,0}} bitcast(%slice)
}}

"""
    body = """  %w = bf16[64,32]{1,0} fusion(%a, %b), kind=kLoop, calls=%inner
  ROOT %y = bf16[4,32]{1,0} dot(%c, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""
    made = fusion_work([WEIGHTS, INDEX, "bf16[4,64]{1,0}"], "bf16[4,32]{1,0}", body, nested)
    assert made.bytes == 2 * (SLICE + 4 * 64 + 4 * 32) + 4
    assert made.flops == 2 * 4 * 32 * 64


def test_pages_gathered_from_a_cache_and_reduced() -> None:
    body = """  %pages = bf16[6,16,128]{2,1,0} gather(%a, %b), offset_dims={1,2}
  %zero = bf16[] constant(0)
  ROOT %sum = bf16[6]{0} reduce(%pages, %zero), dimensions={1,2}, to_apply=%add"""
    made = fusion_work(["bf16[9999,16,128]{2,1,0}", "s32[6]{0}"], "bf16[6]{0}", body)
    assert made.bytes == 2 * 6 * 16 * 128 + 4 * 6 + 2 * 6


def test_an_operand_that_is_sliced_twice() -> None:
    body = f"""  %one = {LAYER} {TAKE.format("%a")}
  %two = {LAYER} {TAKE.format("%a")}
  ROOT %sum = {LAYER} add(%one, %two)"""
    assert fusion_work([WEIGHTS, INDEX], LAYER, body).bytes == 2 * 3 * SLICE + 4


def test_an_operand_that_is_sliced_and_read_whole() -> None:
    body = f"""  %one = {LAYER} {TAKE.format("%a")}
  %all = {WEIGHTS} negate(%a)
  ROOT %t = ({LAYER}, {WEIGHTS}) tuple(%one, %all)"""
    made = fusion_work([WEIGHTS, INDEX], f"({LAYER}, {WEIGHTS})", body)
    assert made.bytes == 2 * (48 * SLICE + SLICE + 48 * SLICE) + 4


@pytest.mark.parametrize("root", ["dynamic-update-slice(%a, %c, %b)", "scatter(%a, %b, %c)"])
def test_of_an_update_in_place_the_update_is_written(root: str) -> None:
    cache, update = "bf16[9999,128]{1,0}", "bf16[6,128]{1,0}"
    made = fusion_work([cache, "s32[6]{0}", update], cache, f"  ROOT %z = {cache} {root}")
    assert made.bytes == 2 * 2 * 6 * 128 + 24


def test_an_update_in_place_behind_changes_of_type_and_shape() -> None:
    cache = "bf16[9999,128]{1,0}"
    body = """  %wide = f32[9999,128]{1,0} convert(%a)
  %update = f32[6,128]{1,0} convert(%c)
  %set = f32[9999,128]{1,0} dynamic-update-slice(%wide, %update, %b, %b)
  %narrow = bf16[9999,128]{1,0} convert(%set)
  ROOT %z = bf16[9999,1,128]{2,1,0} bitcast(%narrow)"""
    made = fusion_work([cache, "s32[]", "bf16[6,128]{1,0}"], "bf16[9999,1,128]{2,1,0}", body)
    assert made.bytes == 2 * 2 * 6 * 128 + 4


def test_an_update_of_what_the_kernel_made_is_written_whole() -> None:
    body = """  %zero = f32[] constant(0)
  %zeros = f32[100]{0} broadcast(%zero), dimensions={}
  ROOT %z = f32[100]{0} dynamic-update-slice(%zeros, %a, %b)"""
    assert fusion_work(["f32[10]{0}", "s32[]"], "f32[100]{0}", body).bytes == 400 + 40 + 4


def test_two_updates_in_one_kernel() -> None:
    cache = "bf16[9999,128]{1,0}"
    body = f"""  %k = {cache} scatter(%a, %c, %d)
  %v = {cache} scatter(%b, %c, %d)
  ROOT %t = ({cache}, {cache}) tuple(%k, %v)"""
    operands = [cache, cache, "s32[6]{0}", "bf16[6,128]{1,0}"]
    # Two results, each written once; the update is read once.
    assert fusion_work(operands, f"({cache}, {cache})", body).bytes == 3 * 2 * 6 * 128 + 24


def test_what_is_handed_through_is_not_moved_and_what_is_converted_is() -> None:
    body = """  %same = f32[64]{0} bitcast(%a)
  %half = bf16[64]{0} convert(%b)
  ROOT %t = (f32[64]{0}, bf16[64]{0}) tuple(%same, %half)"""
    made = fusion_work(["f32[64]{0}", "f32[64]{0}"], "(f32[64]{0}, bf16[64]{0})", body)
    assert made.bytes == 256 + 128


def test_a_collective_in_a_fusion_moves_nothing_through_memory() -> None:
    body = f"""  %gathered = f32[128]{{0}} all-gather(%a), {GROUPS}
  %neg = f32[8]{{0}} negate(%b)
  ROOT %t = (f32[8]{{0}}, f32[64]{{0}}, f32[128]{{0}}) tuple(%neg, %a, %gathered)"""
    made = fusion_work(["f32[64]{0}", "f32[8]{0}"], "(f32[8]{0}, f32[64]{0}, f32[128]{0})", body)
    assert made.bytes == 2 * 32
    body = f"""  %reduced = f32[64]{{0}} all-reduce(%a), {GROUPS}, to_apply=%add
  ROOT %sum = f32[64]{{0}} add(%reduced, %b)"""
    assert fusion_work(["f32[64]{0}", "f32[64]{0}"], "f32[64]{0}", body).bytes == 2 * 256


# --- Without a kernel ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction",
    [
        "(f32[64]{0}, f32[64]{0}) tuple(%x, %x)",
        "f32[8,8]{1,0} bitcast(%x)",
        "f32[64]{0} all-gather-done(%x)",
        "f32[64]{0} async-done(%x)",
        "(f32[64]{0}, f32[64]{0}) async-update(%x, %x)",
        'f32[64]{0} custom-call(%x, %x), custom_call_target="ConcatBitcast"',
        "(f32[64]{0}, token[]) recv(%x)",
    ],
)
def test_bookkeeping_is_free(instruction: str) -> None:
    assert work(f"  %x = f32[64]{{0}} parameter(0)\n  ROOT %z = {instruction}") == Work()


def test_a_scalar_of_tpu_is_free_and_a_kernel_for_one_is_not() -> None:
    scalars = "  %x = s32[] parameter(0)\n  ROOT %z = s32[] "
    assert work(scalars + "add(%x, %x)") == Work()
    assert work(scalars + "copy(%x)") == Work(0, 8, 1)
    assert fusion_work(["s32[]"], "s32[]", "  ROOT %y = s32[] add(%a, %a)") == Work(0, 8, 1)


@pytest.mark.parametrize(
    "result, source, bytes_",
    [("", "", 2 * 256), ("S(1)", "", 0), ("", "S(1)", 0)],
    ids=["main to main", "prefetch", "eviction"],
)
def test_a_copy_within_main_memory_is_work(result: str, source: str, bytes_: int) -> None:
    source_type, result_type = f"f32[64]{{0:T(128){source}}}", f"f32[64]{{0:T(128){result}}}"
    made = work(
        f"  %x = {source_type} parameter(0)\n"
        f"  ROOT %z = ({result_type}, {source_type}, u32[]{{:S(2)}}) copy-start(%x)"
    )
    assert made == Work(0, bytes_, 1 if bytes_ else 0)


@pytest.mark.parametrize("space, bytes_", [("", 2 * 32), ("S(1)", 0)])
def test_a_slice_within_main_memory_is_work(space: str, bytes_: int) -> None:
    parameter = "  %x = f32[64]{0} parameter(0)\n"
    result = f"f32[8]{{0:T(128){space}}}"
    sugared = f"  ROOT %z = ((f32[64]{{0}}), {result}, s32[]{{:S(2)}}) slice-start(%x)"
    assert work(parameter + sugared).bytes == bytes_
    wrapped = f"%w (y: f32[64]) -> f32[8] {{\n  %y = f32[64]{{0}} parameter(0)\n  ROOT %s = {result} slice(%y)\n}}\n\n"
    start = f"  ROOT %z = ((f32[64]{{0}}), {result}, s32[]{{:S(2)}}) async-start(%x), calls=%w"
    assert work(parameter + start, wrapped).bytes == bytes_


# --- The link -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-to-all", 3 / 4),
        ("reduce-scatter", 3 / 4),
        ("all-reduce", 2 * 3 / 4),
        ("all-gather", 3),
        ("collective-permute", 1),
    ],
)
def test_bytes_on_the_link(kind: str, sent: float) -> None:
    _, root = parsed(f"  ROOT %z = f32[1]{{0}} {kind}(%x), replica_groups={{{{0,1,2,3}}}}")
    operand = parse(module("  ROOT %x = f32[100]{0} parameter(0)")).entry.root
    assert cost.link_bytes(kind, root, [operand]) == 400 * sent


def test_a_ragged_exchange_sends_its_rows_and_not_where_they_go() -> None:
    entry = """  %x = f32[100]{0} parameter(0)
  %out = f32[500]{0} parameter(1)
  %n = s32[4]{0} parameter(2)
  ROOT %z = f32[500]{0} ragged-all-to-all(%x, %out, %n, %n, %n, %n), replica_groups={{0,1,2,3}}"""
    text, root = parsed(entry)
    operands = text.entry.operands(root)
    assert cost.link_bytes("ragged-all-to-all", root, operands) == 300
    assert cost.link_bytes("ragged-all-to-all", root, operands, ragged_rows=2.5) == 10


@pytest.mark.parametrize(
    "attributes, groups",
    [
        ("replica_groups={{0,1,2},{3,4,5}}", [[0, 1, 2], [3, 4, 5]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups={}, to_apply=%add", [list(range(16))]),
        ("replica_groups={{5}}", [[5]]),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", [[0, 1], [1, 2], [2, 0]]),
        ("replica_groups=mesh['x'=4] {'x'}, dimensions={0}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['x'=2,'y'=3] {'y'}", [[0, 1, 2], [3, 4, 5]]),
        ("replica_groups=mesh['x'=2,'y'=3] {'x'}", [[0, 3], [1, 4], [2, 5]]),
        ("replica_groups=mesh['x'=2,'y'=2] {'y','x'}", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['x'=8,'y'=1] {'y'}", [[device] for device in range(8)]),
        (
            "replica_groups=mesh['x'=4], device_ids=([2,2]T(1,0)) {'x'}, channel_id=1",
            [[0, 2, 1, 3]],
        ),
    ],
)
def test_devices_of_a_collective(attributes: str, groups: list[list[int]]) -> None:
    _, root = parsed(f"  ROOT %z = f32[1]{{0}} all-reduce(%x), {attributes}")
    assert cost.groups(root, num_devices=16) == groups


@pytest.mark.parametrize(
    "attributes", ["replica_groups=torus[2,2]", "replica_groups=mesh['x'=4], order=odd {'x'}"]
)
def test_groups_of_an_unknown_form_are_an_error(attributes: str) -> None:
    _, root = parsed(f"  ROOT %z = f32[1]{{0}} all-reduce(%x), {attributes}")
    with pytest.raises(ValueError, match="of a form that is not known: "):
        cost.groups(root, num_devices=16)


@pytest.mark.parametrize(
    "opcode, kind",
    [
        ("all-to-all", "all-to-all"),
        ("all-to-all-start", "all-to-all"),
        ("all-to-all-done", "all-to-all"),
        ("ragged-all-to-all-start", "ragged-all-to-all"),
        ("reduce-scatter", "reduce-scatter"),
        ("send", "send"),
        ("send-done", "send"),
        ("recv", None),
        ("copy-start", None),
        ("reduce", None),
        ("async-done", None),
    ],
)
def test_kinds(opcode: str, kind: str | None) -> None:
    text, root = parsed(f"  %x = f32[1]{{0}} parameter(0)\n  ROOT %z = f32[1]{{0}} {opcode}(%x)")
    assert cost.collective_kind(text, root) == kind


# --- Seconds ------------------------------------------------------------------------------------


def test_a_kernel_takes_the_longer_of_its_products_and_its_bytes() -> None:
    links = NodeLinks(bandwidth=1.0, start_seconds=0.0)
    rates = Rates(100.0, 10.0, launch_seconds=0.5, links=links)
    assert Work(flops=300, bytes=10, kernels=1).seconds(rates) == 3.5
    assert Work(flops=300, bytes=50, kernels=1).seconds(rates) == 5.5
    assert (Work(1, 2, 3) + Work(4, 5, 6)) * 2 == Work(10, 14, 18)


def test_products_of_each_type_at_their_own_rate() -> None:
    links = NodeLinks(bandwidth=1.0, start_seconds=0.0)
    rates = Rates(100.0, 1e9, 0.0, links, matmul_flops_of={"f8": 200.0, "f32_highest": 10.0})
    assert Work(300).seconds(rates) == 3
    assert Work(300, of_types=(("f8", 200),)).seconds(rates) == 1 + 1
    assert Work(300, of_types=(("f32_highest", 300),)).seconds(rates) == 30
    assert Work(300, of_types=(("f64", 300),)).seconds(rates) == 3  # and listed as not priced
    both = Work(1, of_types=(("f8", 1),)) + Work(5, of_types=(("f8", 2), ("s8", 3)))
    assert both == Work(6, of_types=(("f8", 3), ("s8", 3)))
    assert both * 2 == Work(12, of_types=(("f8", 6), ("s8", 6)))


@pytest.mark.parametrize(
    "lhs, rhs, more, dtype",
    [
        ("bf16", "bf16", "", "bf16"),
        ("f16", "f16", "", "bf16"),
        ("f32", "f32", "", "f32"),
        ("f32", "bf16", "", "f32"),
        ("f32", "f32", ", operand_precision={highest,highest}", "f32_highest"),
        ("f32", "f32", ", operand_precision={default,default}", "f32"),
        ("f64", "f64", "", "f64"),
        ("f8e4m3fn", "f8e5m2", "", "f8"),
        ("s8", "s8", "", "s8"),
        ("f8e4m3fn", "bf16", "", "bf16"),
        ("s32", "s32", "", "s32"),
    ],
)
def test_the_type_of_a_product(lhs: str, rhs: str, more: str, dtype: str) -> None:
    entry = (
        f"  %x = {lhs}[4,8]{{1,0}} parameter(0)\n  %y = {rhs}[8,3]{{1,0}} parameter(1)\n"
        "  ROOT %z = f32[4,3]{1,0} dot(%x, %y), lhs_contracting_dims={1}, "
        f"rhs_contracting_dims={{0}}{more}"
    )
    made = work(entry)
    flops = 2 * 4 * 3 * 8
    assert (made.flops, made.of_types) == (flops, () if dtype == "bf16" else ((dtype, flops),))


def test_the_precision_of_a_product_of_cublas() -> None:
    made = work(
        """  %x = f32[512,64]{1,0} parameter(0)
  %y = f32[64,32]{1,0} parameter(1)
  ROOT %z = (f32[512,32]{1,0}, s8[33]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"precision_config":{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"}}}"""
    )
    assert made.of_types == (("f32_highest", made.flops),)


@pytest.mark.parametrize(
    "instruction, why",
    [
        ('custom-call(%x), custom_call_target="mine"', "custom call mine: its bytes are counted"),
        ("cholesky(%x)", "cholesky: its bytes are counted, its operations are not"),
        ("fft(%x), fft_type=FFT, fft_length={4}", "fft: "),
        ('custom-call(%x), custom_call_target="Sharding"', None),
        ('custom-call(%x), custom_call_target="k", backend_config={"flops":"12"}', None),
        ("add(%x, %x)", None),
        ("sort(%x), dimensions={0}", None),  # its bytes are what it costs
    ],
)
def test_what_is_not_priced(instruction: str, why: str | None) -> None:
    _, root = parsed(
        f"  %x = f32[4,4]{{1,0}} parameter(0)\n  ROOT %z = f32[4,4]{{1,0}} {instruction}"
    )
    found = cost.unpriced(root)
    assert found is None if why is None else found is not None and found.startswith(why)
