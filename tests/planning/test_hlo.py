"""Summaries of HLO text written by hand, for what small compiles do not produce."""

import pytest

from mtjax.planning.hlo import summarize
from mtjax.planning.hlo_text import dtype_bits, parse_module
from mtjax.planning.targets import parse_target
from mtjax.planning.timing import estimate

NESTED = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_body (p.0: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p.0 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i.0 = s32[] get-tuple-element(%p.0), index=0
  %x.0 = bf16[8,16]{1,0} get-tuple-element(%p.0), index=1
  %ag = ((bf16[8,16]{1,0}), bf16[64,16]{1,0}) all-gather-start(%x.0), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(step)/layer/gather"}
  %tick = s32[] fusion(%i.0), kind=kLoop, calls=%add_one
  %big = f32[64,64]{1,0} fusion(%x.0), kind=kLoop, calls=%broadcast_it
  %agd = bf16[64,16]{1,0} all-gather-done(%ag)
  ROOT %out.0 = (s32[], bf16[8,16]{1,0}) tuple(%tick, %x.0)
}

%below (p.1: (s32[], bf16[8,16])) -> pred[] {
  %p.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n.1 = s32[] constant(7)
  ROOT %lt.1 = pred[] compare(%i.1, %n.1), direction=LT
}

%below_fused_compare (c.0: s32[]) -> pred[] {
  %c.0 = s32[] parameter(0)
  %n.2 = s32[] constant(3)
  ROOT %lt.2 = pred[] compare(%c.0, %n.2), direction=LT
}

%below_fused (p.2: (s32[], bf16[8,16])) -> pred[] {
  %p.2 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  ROOT %lt.3 = pred[] fusion(%i.2), kind=kLoop, calls=%below_fused_compare
}

%outer_body (p.3: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p.3 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x.3 = bf16[8,16]{1,0} get-tuple-element(%p.3), index=1
  %start.3 = s32[] constant(2)
  %copy.3 = s32[] copy(%start.3)
  %state.3 = (s32[], bf16[8,16]{1,0}) tuple(%copy.3, /*index=1*/%x.3)
  ROOT %inner = (s32[], bf16[8,16]{1,0}) while(%state.3), condition=%below, body=%inner_body
}

%scatter_comp (p.4: f32[64,32]) -> f32[8,32] {
  %p.4 = f32[64,32]{1,0} parameter(0)
  ROOT %rs = f32[8,32]{1,0} reduce-scatter(%p.4), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[8,16], g: f32[64,32], q: f8e4m3fn[16,32], w: f8e4m3fn[32,8]) -> f32[8,32] {
  %x = bf16[8,16]{1,0} parameter(0)
  %g = f32[64,32]{1,0} parameter(1)
  %q = f8e4m3fn[16,32]{1,0} parameter(2)
  %w = f8e4m3fn[32,8]{0,1} parameter(3)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[8,16]{1,0}) tuple(%zero, %x)
  %outer = (s32[], bf16[8,16]{1,0}) while(%state), condition=%below_fused, body=%outer_body
  %one = f32[] constant(1)
  %mm = (bf16[16,8]{1,0}, s8[4194304]{0}) custom-call(%q, %w, %one), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %fa = (bf16[8,16]{1,0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %sc = ((f32[64,32]{1,0}), f32[8,32]{1,0}) async-start(%g), calls=%scatter_comp, \
metadata={op_name="jit(step)/reduce (weird \\"name\\")"}
  %a2a = (bf16[1,16]{1,0}, bf16[1,16]{1,0}) all-to-all(%x, %x), replica_groups={{0,1}}
  ROOT %scd = f32[8,32]{1,0} async-done(%sc)
}
"""


@pytest.fixture(scope="module")
def nested():
    return summarize(NESTED, {"fsdp": 8})


def test_nested_loops_multiply_and_take_trips_from_their_conditions(nested):
    # Outer: 0 below 3, behind a fusion. Inner: from 2 below 7.
    assert [(loop.body, loop.trips) for loop in nested.loops] == [
        ("outer_body", 3),
        ("inner_body", 5),
    ]
    (gather,) = nested.collectives("all-gather", inside_loop=True)
    assert [loop.trips for loop in gather.loops] == [3, 5]
    assert gather.executions == 15


def test_a_known_trip_count_wins_over_the_condition():
    text = NESTED.replace(
        "condition=%below, body=%inner_body",
        'condition=%below, body=%inner_body, backend_config={"known_trip_count":{"n":"9"}}',
    )
    assert summarize(text).loops[1].trips == 9


def test_a_loop_of_unknown_length_counts_once():
    summary = summarize(NESTED.replace("direction=LT", "direction=NE"), {"fsdp": 8})
    assert [loop.trips for loop in summary.loops] == [None, None]
    assert summary.collectives("all-gather")[0].executions == 1


def test_an_async_start_reports_the_work_that_hides_it(nested):
    (gather,) = nested.collectives("all-gather")
    assert gather.is_async
    # The fusion on 64x64 counts, the one on the loop counter does not.
    assert gather.overlapped_ops == 1
    assert (gather.operand_bytes, gather.output_bytes) == (8 * 16 * 2, 64 * 16 * 2)
    assert gather.axes == ("fsdp",)


def test_a_start_that_xla_runs_synchronously_is_sync():
    text = NESTED.replace(
        "channel_id=1, ",
        'channel_id=1, backend_config={"collective_backend_config":{"is_sync":true}}, ',
    )
    (gather,) = summarize(text, {"fsdp": 8}).collectives("all-gather")
    assert (gather.is_async, gather.overlapped_ops) == (False, 0)


def test_a_reduce_scatter_wrapped_in_a_computation_is_found(nested):
    (scatter,) = nested.collectives("reduce-scatter", axis="fsdp", dtype="f32")
    assert scatter.is_async and not scatter.inside_loop
    assert (scatter.operand_bytes, scatter.output_bytes) == (64 * 32 * 4, 8 * 32 * 4)
    assert scatter.wire_bytes == 64 * 32 * 4 * 7 / 8
    assert scatter.op_name.startswith("jit(step)/reduce (weird")


def test_fp8_cublas_calls_are_products_and_attention_is_a_library_call(nested):
    (gemm,) = nested.all_gemms
    assert (gemm.lhs.dtype, gemm.output.dtype, gemm.backend) == ("f8e4m3fn", "bf16", "cublas")
    assert gemm.flops == 2 * 16 * 32 * 8
    assert [call.target for call in nested.custom_calls] == ["__cudnn$fmhaSoftmax"]


BLOCK_SCALED = """\
HloModule scaled, is_scheduled=true, num_partitions=8

ENTRY %main (x: f8e4m3fn[2,64,128], w: f8e4m3fn[2,256,128]) -> bf16[2,64,256] {
  %x = f8e4m3fn[2,64,128]{2,1,0} parameter(0)
  %w = f8e4m3fn[2,256,128]{2,1,0} parameter(1)
  %xs = f8e8m0fnu[2,128,4]{2,1,0} constant({...})
  %ws = f8e8m0fnu[2,256,4]{2,1,0} constant({...})
  %mm = (bf16[2,64,256]{2,1,0}, u8[0]{0}) custom-call(%x, %w, %xs, %ws), \
custom_call_target="__cudnn$blockScaledDot"
  ROOT %y = bf16[2,64,256]{2,1,0} get-tuple-element(%mm), index=0
}
"""


def test_block_scaled_calls_are_products_at_the_rate_of_their_operands():
    (gemm,) = summarize(BLOCK_SCALED).all_gemms
    assert (gemm.lhs.dtype, gemm.rhs.dtype, gemm.backend) == ("f8e4m3fn", "f8e4m3fn", "cudnn")
    assert gemm.flops == 2 * 2 * 64 * 256 * 128
    timing = estimate(BLOCK_SCALED, parse_target("b200"), {})
    assert timing.flops == {"fp8": gemm.flops}
    assert set(timing.kernels_s) == {"gemm"}


def test_combined_buffers_are_one_collective(nested):
    (exchange,) = nested.collectives("all-to-all")
    assert [str(array) for array in exchange.operands] == ["bf16[8,16]", "bf16[8,16]"]
    assert exchange.group_size == 2


def test_queries_combine_and_op_names_are_patterns(nested):
    assert len(nested.collectives(op_name=r"layer/\w+$")) == 1
    assert nested.collectives("all-gather", dtype="f32") == []
    assert nested.collectives(inside_loop=False, dtype="bf16") == nested.collectives("all-to-all")
    assert nested.gemms(dtype="bf16") == []


def test_a_misspelt_query_is_an_error_and_not_an_empty_list(nested):
    with pytest.raises(ValueError, match="got 'all_gather', expected one of all-gather"):
        nested.collectives("all_gather")
    with pytest.raises(ValueError, match="got 'tensor', expected axes of the mesh"):
        nested.collectives(axis="tensor")


def test_the_printed_summary_names_what_was_found(nested):
    text = str(nested)
    assert "15 x all-gather over (fsdp) in loop depth 2, async over 1 ops" in text
    assert "loop inner_body: 5 trips" in text


@pytest.mark.parametrize(
    ("dtype", "bits"), [("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("u32", 32), ("pred", 8)]
)
def test_dtypes_have_their_width(dtype, bits):
    assert dtype_bits(dtype) == bits


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="expected a module with an ENTRY"):
        parse_module("module @jit_f { func.func public @main }")
