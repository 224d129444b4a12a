from __future__ import annotations

import pytest
from hlo_texts import ADD, module

from tbo_jax.schedule.hlo import Array, Instruction, parse

GPU = """HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias), {2}: (0, {}, must-alias) }, buffer_donor={ (3, {}) }, entry_computation_layout={(bf16[4,8]{1,0}, f32[8]{0})->bf16[4,8]{1,0}}, replica_count=2, num_partitions=4

FileNames
1 "tbo_jax/runner.py"
2 "tbo_jax/moe/exchange.py"

FunctionNames
1 "ModelRunner._jitted.<locals>.step"
2 "send"

FileLocations
1 {file_name_id=1 function_name_id=1 line=53 end_line=53 column=10 end_column=40}
2 {file_name_id=2 function_name_id=2 line=24 end_line=26 column=6 end_column=49}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


%fused (p.1: bf16[4,8]) -> bf16[4,8] {
  %p.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %neg.1 = bf16[4,8]{1,0} negate(%p.1)
}

%helper (p.2: bf16[4,8]) -> bf16[4,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  ROOT %neg.2 = bf16[4,8]{1,0} negate(%p.2)
}, execution_thread="sparsecore"

ENTRY %main.1_spmd (p: bf16[4,8], q: f32[8], /*index=2*/r: f32[]) -> bf16[4,8] {
  %q = f32[8]{0} parameter(1), metadata={op_name="b"}
  %p = bf16[4,8]{1,0} parameter(0), metadata={op_name="a"}
  %start = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/layer_0/micro_batch_0/dispatch/all_to_all" stack_frame_id=2}, backend_config={"collective_backend_config":{"is_sync":false}}
  %fusion = (bf16[4,8]{1,0}, /*index=1*/f32[8]{0}) fusion(%p, /*index=1*/%q), kind=kLoop, calls=%fused
  %done = bf16[4,8]{1,0} all-to-all-done(%start)
  ROOT %kernel = bf16[4,8]{1,0} custom-call(%done), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="kernel" source_file="tbo_jax/runner.py" source_line=7}, backend_config={ir = "(\\22 ) }", num_stages = 3 : i32}
}
"""


def instruction(line: str) -> Instruction:
    return parse(module(f"  ROOT {line}")).entry.root


def test_header() -> None:
    module = parse(GPU)
    assert (module.name, module.is_scheduled, module.num_devices) == ("jit_step", True, 8)
    assert module.aliased_parameters == {0, 2}
    assert module.donated_parameters == {0, 2, 3}


def test_computations_keep_the_order_of_the_schedule() -> None:
    module = parse(GPU)
    assert list(module.computations) == ["fused", "helper", "main.1_spmd"]
    assert module.entry.name == "main.1_spmd"
    names = [i.name for i in module.entry.instructions]
    assert names == ["q", "p", "start", "fusion", "done", "kernel"]
    assert module.entry.root.name == "kernel"
    assert [module.entry.parameters[n].name for n in (0, 1)] == ["p", "q"]


def test_an_instruction() -> None:
    start = parse(GPU).entry.by_name["start"]
    assert (start.opcode, start.operands, start.bytes) == ("all-to-all-start", ("p",), 128)
    assert start.arrays == (Array("bf16", (4, 8)), Array("bf16", (4, 8)))
    assert start.op_name == "jit(step)/shard_map/layer_0/micro_batch_0/dispatch/all_to_all"
    assert start.source == "tbo_jax/moe/exchange.py:24"
    assert start.dims("dimensions") == (0,)


def test_a_custom_call_with_parentheses_and_quotes_in_its_configuration() -> None:
    kernel = parse(GPU).entry.root
    assert kernel.target == "__gpu$xla.gpu.triton"
    assert kernel.source == "tbo_jax/runner.py:7"
    assert kernel.operands == ("done",)


def test_attributes_with_lines_of_their_own() -> None:
    """As JAX's splash attention writes what it was called with."""
    read = parse(
        module(
            """  %p = f32[4]{0} parameter(0)
  %call = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"use = \\": false}"
}}, metadata={op_name="jit(step)/splash"}
  ROOT %sum = f32[4]{0} add(%call, %p)"""
        )
    )
    _, call, last = read.entry.instructions
    assert (call.target, call.op_name) == ("tpu_custom_call", "jit(step)/splash")
    assert last.opcode == "add" and last.is_root and last.operands == ("call", "p")


def test_who_calls_and_who_reads() -> None:
    module = parse(GPU)
    entry = module.entry
    assert [c.name for c in module.called(entry.by_name["fusion"])] == ["fused"]
    assert [i.name for i in entry.operands(entry.by_name["fusion"])] == ["p", "q"]
    walked = [i.name for i in module.walk(entry)]
    assert walked.index("fusion") < walked.index("neg.1") < walked.index("done")


@pytest.mark.parametrize(
    "attributes, called",
    [
        ("calls=%add", ("add",)),
        ("condition=%cond, body=%add", ("add",)),
        ("to_apply=%add", ("add",)),
        ("branch_computations={%add, %add}", ("add", "add")),
        ('custom_call_target="x", called_computations={%add}', ("add",)),
    ],
)
def test_called_computations(attributes: str, called: tuple[str, ...]) -> None:
    text = module(f"  ROOT %x = f32[] thing(%y), {attributes}", ADD)
    assert parse(text).entry.root.called == called


def test_the_branches_of_a_conditional_on_a_predicate() -> None:
    made = instruction(
        "%x = f32[] conditional(%c, %a, %b), true_computation=%t, false_computation=%f"
    )
    assert made.called == ("t", "f")


def test_tiled_layouts_and_memory_spaces() -> None:
    made = instruction(
        "%x = (bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, bf16[8,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) "
        "copy-start(%p)"
    )
    assert [array.memory_space for array in made.arrays] == [1, 0, 2]
    assert made.arrays[0].dims == (8, 64)


@pytest.mark.parametrize(
    "type_, size",
    [
        ("f32[3,5]{1,0}", 60),
        ("bf16[3,5]{1,0}", 30),
        ("f8e4m3fn[3,5]{1,0}", 15),
        ("s4[3,5]{1,0:E(4)}", 8),
        ("pred[7]{0}", 7),
        ("c64[2]{0}", 16),
        ("s64[]", 8),
        ("token[]", 0),
        ("f32[<=6,2]{1,0}", 48),
        ("f32[0,4]{1,0}", 0),
        ("()", 0),
        ("(f32[2]{0}, (s8[3]{0}, f32[]))", 15),
    ],
)
def test_bytes_of_a_type(type_: str, size: int) -> None:
    assert instruction(f"%x = {type_} thing(%p)").bytes == size


def test_turns_that_the_compiler_knows() -> None:
    made = instruction(
        "%x = (s32[]) while(%p), condition=%c, body=%b, "
        'backend_config={"known_trip_count":{"n":"47"},"known_init_step":{"init":"0","step":"1"}}'
    )
    assert made.known_trip_count == 47
    assert instruction("%x = (s32[]) while(%p), condition=%c, body=%b").known_trip_count is None


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "this is no HLO module"),
        ("module @jit_step {", "this is no HLO module: it begins with 'module @jit_step {'"),
        ("HloModule jit_step, is_scheduled=true\n", "without an ENTRY computation"),
    ],
)
def test_other_texts_are_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse(text)
