"""Which mesh axes a collective runs over, from the device groups in the HLO text.

XLA numbers the devices of a partitioned program by their position in the flattened mesh, so a
group of numbers is a set of mesh coordinates.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(r"replica_groups=(\{(?:\{[\d,]*\},?)*\})")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*(?:\([^)]*\))?)\))? \{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def iota(text: str) -> np.ndarray:
    """Device numbers of XLA's iota form: [2,4]<=[4,2]T(1,0) is reshape, transpose, reshape."""
    dims, source, *order = re.findall(r"[\[(]([\d,]+)[\])]", text)
    array = np.arange(math.prod(_ints(source))).reshape(_ints(source))
    if order:
        array = array.transpose(_ints(order[0]))
    return array.reshape(_ints(dims))


def _mesh_groups(axes_text: str, device_text: str | None, over_text: str) -> Groups:
    """Groups of the form mesh['a'=4,'b'=2] {'b'}; an axis part is written 'a':(before)size."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes_text)}
    devices = np.arange(math.prod(sizes.values()))
    if device_text and "<=" in device_text:
        devices = iota(device_text).reshape(-1)
    elif device_text:
        # A list may be preceded by its shape in brackets.
        devices = np.array(_ints(re.sub(r"\[[\d,]*\]", "", device_text)))
    parts = re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", over_text)
    dims, grouped = [], {}
    for axis, size in sizes.items():
        splits = sorted((int(b), int(n)) for name, b, n in parts if name == axis and n)
        if not splits and any(name == axis for name, _, _ in parts):
            splits = [(1, size)]
        done = 1
        for before, width in splits:
            dims += [before // done, width]
            grouped[axis, before] = len(dims) - 1
            done = before * width
        dims.append(size // done)
    order = [grouped[name, int(before or 1)] for name, before, _ in parts]
    rest = [i for i in range(len(dims)) if i not in order]
    width = math.prod(dims[i] for i in order)
    array = devices.reshape(dims).transpose(rest + order).reshape(-1, width)
    return tuple(tuple(map(int, row)) for row in array)


def parse_groups(attributes: str, num_partitions: int) -> Groups:
    """Device groups of a collective; of a collective-permute, its (source, target) pairs.

    Empty groups in the text mean one group of all devices.

    Raises:
        ValueError: the text has a form not known here.
    """
    pairs = _PAIRS.search(attributes)
    if pairs:
        flat = _ints(pairs[1])
        return tuple(zip(flat[::2], flat[1::2], strict=True))
    mesh, iota_form, lists = (form.search(attributes) for form in (_MESH, _IOTA, _LISTS))
    if mesh:
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    if iota_form:
        return tuple(tuple(map(int, row)) for row in iota(iota_form[1]))
    groups = tuple(filter(None, map(_ints, re.findall(r"\{([\d,]+)\}", lists[1])))) if lists else ()
    if not groups and "replica_groups=" in attributes and not lists:
        raise ValueError(
            f"replica groups: got {attributes[:200]!r}, expected lists, iota or mesh axes; teach "
            "mtjax/planning/groups.py the form of this jaxlib"
        )
    return groups or (tuple(range(num_partitions)),)


def group_axes(groups: Iterable[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes, in mesh order, along which members of one group differ.

    Axes of size 1 never appear. A number outside the mesh raises IndexError: the shape belongs to
    another program.
    """
    names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    num_devices = math.prod(sizes)
    varying = set()
    for group in groups:
        if max(group) >= num_devices:
            raise IndexError(
                f"device {max(group)} is outside the mesh {dict(mesh_shape)} of {num_devices}; "
                "pass the shape of the mesh the program was compiled for"
            )
        coordinates = np.array(np.unravel_index(group, sizes))
        varying |= {names[i] for i in np.flatnonzero((coordinates != coordinates[:, :1]).any(1))}
    return tuple(name for name in names if name in varying)
