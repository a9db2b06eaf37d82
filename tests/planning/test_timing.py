"""The roofline on programs whose time is known by arithmetic."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.planning.compile import compile_for
from mtjax.planning.cost import rate_dtype
from mtjax.planning.hlo import Collective
from mtjax.planning.hlo_text import Array
from mtjax.planning.targets import parse_target
from mtjax.planning.timing import collective_seconds, estimate

H200 = parse_target("h200:1x8")
N = 8192
GEMM_S = 2 * N**3 / 989e12
GEMM_BYTES_S = 3 * N * N * 2 / 4.8e12


def time_of(mesh, fn, *args, **options):
    program = compile_for(mesh, fn, *args, **options)
    return estimate(program.hlo, H200, program.mesh_shape)


def bf16(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)


def test_one_large_product_takes_its_flops(h200_mesh):
    timing = time_of(h200_mesh(fsdp=8), lambda a, b: a @ b, bf16(N, N), bf16(N, N))
    assert timing.total_s == pytest.approx(GEMM_S)
    assert timing.kernels_s == pytest.approx({"gemm": GEMM_S})
    assert timing.flops == {"bf16": 2 * N**3}
    assert GEMM_BYTES_S < GEMM_S


def test_a_kernel_without_products_takes_its_bytes(h200_mesh):
    timing = time_of(h200_mesh(fsdp=8), lambda a, b: a + jnp.tanh(b), bf16(N, N), bf16(N, N))
    assert timing.kernels_s == pytest.approx({"memory": 3 * N * N * 2 / 4.8e12})
    assert timing.total_s == timing.kernels_s["memory"]


def test_a_scan_of_products_takes_as_many(h200_mesh):
    def repeated(a, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), a, None, length=10)[0]

    timing = time_of(h200_mesh(fsdp=8), repeated, bf16(N, N), bf16(N, N))
    # The operand is copied, and after each trip its result to the place of its input.
    copies_s = 11 * 2 * N * N * 2 / 4.8e12
    assert timing.kernels_s == pytest.approx({"gemm": 10 * GEMM_S, "memory": copies_s}, rel=1e-4)
    assert timing.total_s == pytest.approx(10 * GEMM_S + copies_s, rel=1e-4)


def test_a_slice_of_a_stack_is_read_and_not_the_stack(h200_mesh):
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jax.nn.relu(x * w), None), x, w)[0]

    timing = time_of(h200_mesh(fsdp=8), layers, bf16(N, N), bf16(64, N, N))
    # Per layer: read x and the layer's weight, write x.
    assert timing.total_s == pytest.approx(64 * 3 * N * N * 2 / 4.8e12, rel=0.05)


def test_an_all_reduce_takes_the_ring_volume(h200_mesh):
    mesh = h200_mesh(fsdp=8)
    x = jax.ShapeDtypeStruct((8, 2**26), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    timing = time_of(mesh, lambda x: jnp.sum(x, 0), x)
    ring_s = 2 * 7 / 8 * 2**26 * 4 / 450e9
    assert sum(timing.collectives_s.values()) == pytest.approx(ring_s)
    assert timing.exposed_s == pytest.approx({"fsdp": ring_s})


OVERLAPPED = """\
HloModule overlapped, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%body (carry: (s32[], bf16[{n},{n}], f32[{m}])) -> (s32[], bf16[{n},{n}], f32[{m}]) {{
  %carry = (s32[], bf16[{n},{n}], f32[{m}]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %a = bf16[{n},{n}] get-tuple-element(%carry), index=1
  %g = f32[{m}] get-tuple-element(%carry), index=2
  %start = f32[{m}] all-reduce-start(%g), replica_groups=[1,8]<=[8], to_apply=%add
  %dot = bf16[{n},{n}] dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %done = f32[{m}] all-reduce-done(%start)
  ROOT %next = (s32[], bf16[{n},{n}], f32[{m}]) tuple(%i, %dot, %done)
}}

%condition (carry: (s32[], bf16[{n},{n}], f32[{m}])) -> pred[] {{
  %carry = (s32[], bf16[{n},{n}], f32[{m}]) parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (a: bf16[{n},{n}], g: f32[{m}]) -> (s32[], bf16[{n},{n}], f32[{m}]) {{
  %a = bf16[{n},{n}] parameter(0)
  %g = f32[{m}] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[{n},{n}], f32[{m}]) tuple(%zero, %a, %g)
  ROOT %loop = (s32[], bf16[{n},{n}], f32[{m}]) while(%start), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""


@pytest.mark.parametrize("m", [2**20, 2**30])
def test_a_product_beside_an_all_reduce_takes_the_longer_of_both(m):
    timing = estimate(OVERLAPPED.format(n=N, m=m), H200, {"fsdp": 8})
    ring_s = 2 * 7 / 8 * m * 4 / 450e9
    assert timing.total_s == pytest.approx(5 * max(GEMM_S, ring_s))
    assert sum(timing.exposed_s.values()) == pytest.approx(5 * max(0.0, ring_s - GEMM_S))
    assert timing.collectives_s == pytest.approx({"fsdp": 5 * ring_s})


def test_attention_takes_half_its_square(h200_mesh):
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    q, k = bf16(1, 16384, 32, 128), bf16(1, 16384, 8, 128)
    timing = time_of(h200_mesh(fsdp=8), attend, q, k, k)
    flops = 2 * 2 * 32 * 128 * 16384**2 / 2
    assert timing.kernels_s["attention"] == pytest.approx(flops / 989e12, rel=1e-3)


def collective(kind, groups, num_bytes=8 * 2**30):
    return Collective(
        name="c",
        op_name="",
        loops=(),
        kind=kind,
        operands=(Array("u8", (num_bytes,)),),
        groups=groups,
        axes=(),
        is_async=False,
        overlapped_ops=0,
    )


WHOLE = 8 * 2**30
PAIRS = (0, 1, 8, 9, 16, 17, 24, 25)


@pytest.mark.parametrize(
    ("target", "kind", "groups", "seconds"),
    [
        # Within a host: a ring over NVLink.
        ("h200:1x8", "reduce-scatter", ((0, 1, 2, 3),), WHOLE * 3 / 4 / 450e9),
        # One GPU in each of four hosts: a ring over one network card.
        ("h200:4x8", "reduce-scatter", ((0, 8, 16, 24),), WHOLE * 3 / 4 / 50e9),
        # Two GPUs in each of four hosts: two cards share what comes from the other hosts.
        ("h200:4x8", "reduce-scatter", (PAIRS,), WHOLE * 3 / 4 / 2 / 50e9),
        ("h200:4x8", "all-reduce", (PAIRS,), 2 * WHOLE * 3 / 4 / 2 / 50e9),
        # All GPUs of two hosts: eight cards are faster than the NVLink ring of one GPU.
        ("h200:2x8", "reduce-scatter", (tuple(range(16)),), WHOLE * 15 / 16 / 450e9),
        # A rack of 72 is one domain, whatever the hosts.
        ("gb200:18x4", "reduce-scatter", ((0, 4, 8, 12),), WHOLE * 3 / 4 / 900e9),
        ("gb200:36x4", "reduce-scatter", ((0, 72),), WHOLE / 2 / 50e9),
        # Each GPU sends half of its bytes, but its own share, to the other host.
        ("h200:2x8", "all-to-all", (tuple(range(16)),), WHOLE * 8 / 16 / 50e9),
        ("h200:2x8", "collective-permute", ((0, 1), (1, 2)), WHOLE / 450e9),
        ("h200:2x8", "collective-permute", ((0, 1), (7, 8)), WHOLE / 50e9),
        ("h200:1x8", "all-reduce", ((0,), (1,)), 0.0),
    ],
)
def test_a_collective_takes_the_time_of_its_slowest_link(target, kind, groups, seconds):
    found = collective_seconds(collective(kind, groups), parse_target(target))
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("lhs", "rhs", "exact", "rate"),
    [
        ("bf16", "bf16", False, "bf16"),
        ("f8e4m3fn", "f8e5m2", False, "fp8"),
        ("f8e4m3fn", "bf16", False, "bf16"),
        ("f32", "bf16", False, "tf32"),
        ("f32", "f32", True, "fp32"),
        ("s8", "s8", False, "int8"),
        ("f4e2m1fn", "f4e2m1fn", False, "fp4"),
    ],
)
def test_the_slower_side_sets_the_rate_of_a_product(lhs, rhs, exact, rate):
    assert rate_dtype(lhs, rhs, exact) == rate
