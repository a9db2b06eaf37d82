"""Device groups in each form XLA prints them, and the mesh axes they mean."""

import pytest

from mtjax.planning.groups import group_axes, parse_groups

MESH = {"fsdp": 4, "tensor": 2}
OVER_TENSOR = ((0, 1), (2, 3), (4, 5), (6, 7))
OVER_FSDP = ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", OVER_TENSOR),
        ("replica_groups=[4,2]<=[8]", OVER_TENSOR),
        ("replica_groups=mesh['fsdp'=4,'tensor'=2] {'tensor'}", OVER_TENSOR),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(4)2}", OVER_TENSOR),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", OVER_FSDP),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", OVER_FSDP),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", OVER_FSDP),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)4}", OVER_FSDP),
        ("replica_groups=mesh['b'=2,'a'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'a'}", OVER_FSDP),
        ("replica_groups=mesh['b'=2,'a'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", OVER_FSDP),
        ("replica_groups=mesh[b=2,a=4], device_ids=([2,4]0,2,4,6,1,3,5,7) {a}", OVER_FSDP),
    ],
)
def test_every_form_of_replica_groups_gives_the_same_devices(text, groups):
    attributes = f", channel_id=1, {text}, use_global_device_ids=true, dimensions={{0}}"
    assert parse_groups(attributes, 8) == groups
    assert group_axes(groups, MESH) == (("tensor",) if groups is OVER_TENSOR else ("fsdp",))


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups={}",
        "to_apply=%add",
        "replica_groups={{0,1,2,3,4,5,6,7}}",
        "replica_groups=mesh['a'=2,'b'=4] {'a','b'}",
    ],
)
def test_no_groups_mean_all_devices(text):
    groups = parse_groups(f", {text}, channel_id=1", 8)
    assert groups == (tuple(range(8)),)
    assert group_axes(groups, MESH) == ("fsdp", "tensor")


def test_two_parts_of_one_axis_are_grouped_in_the_order_given():
    groups = parse_groups(", replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", 8)
    assert groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert group_axes(groups, {"x": 2, "y": 2, "z": 2}) == ("x", "z")


def test_a_permute_runs_over_the_axes_along_which_its_pairs_differ():
    pairs = parse_groups(", source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3}}", 8)
    assert pairs[:2] == ((0, 2), (2, 4))
    assert group_axes(pairs, MESH) == ("fsdp",)


def test_axes_of_size_one_never_appear():
    shape = {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    assert group_axes(OVER_FSDP, shape) == ("fsdp",)


def test_an_unknown_form_is_an_error():
    with pytest.raises(ValueError, match="expected lists, iota or mesh axes"):
        parse_groups(", replica_groups=<something new>, channel_id=1", 8)


def test_a_program_larger_than_the_mesh_is_an_error():
    with pytest.raises(IndexError, match="device 6 is outside the mesh"):
        group_axes(OVER_FSDP, {"tensor": 2})
