"""A training state as a flat dict of named arrays, the form in which it is stored.

Names are tree paths joined by "/", such as `params/layers/attention/query`. Storing names and not
containers keeps a checkpoint readable when a tuple becomes a dataclass, and makes reading only a
part of it exact.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mtjax.checkpoint.manifest import CheckpointMismatch

_KEY_IMPLEMENTATIONS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
_SHOWN = 20


def named_leaves(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a pytree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def to_stored(state: Any) -> dict[str, Any]:
    """Named arrays of `state`, ready for orbax: typed PRNG keys as their key data.

    Arrays that live on one process only (a step counter, say) become numpy arrays, which process
    0 writes; they must be equal on all processes.
    """
    stored = {}
    for name, leaf in named_leaves(state).items():
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        elif isinstance(leaf, bool | int | float):
            leaf = jax.numpy.asarray(leaf)  # to the dtype jax would give it
        local = not isinstance(leaf, jax.Array) or (
            jax.process_count() > 1 and leaf.is_fully_addressable
        )
        stored[name] = np.asarray(leaf) if local else leaf
    return stored


def abstract_stored(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The stored form of a tree of ShapeDtypeStruct, each with a sharding.

    Raises ValueError for a leaf without one, or whose shape its sharding does not divide.
    """
    stored = {}
    for name, leaf in named_leaves(abstract_state).items():
        sharding = getattr(leaf, "sharding", None)
        if sharding is None:
            raise ValueError(
                f"{name} has no sharding, expected jax.ShapeDtypeStruct(shape, dtype, sharding="
                "NamedSharding(...)): pass the sharding it shall be restored to"
            )
        if _is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"{name} can't be restored to this mesh: {error}") from error
        stored[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return stored


def from_stored(stored: Mapping[str, jax.Array], abstract_state: Any) -> Any:
    """The pytree of `abstract_state` filled with the arrays of `stored`."""
    names = list(named_leaves(abstract_state))
    leaves, treedef = jax.tree_util.tree_flatten(abstract_state)
    filled = []
    for name, leaf in zip(names, leaves, strict=True):
        array = stored[name]
        if _is_key(leaf):
            array = jax.random.wrap_key_data(array, impl=_key_implementation(leaf.dtype))
        filled.append(array)
    return jax.tree_util.tree_unflatten(treedef, filled)


def check_leaves(
    saved: Mapping[str, Any],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    where: str,
    *,
    partial: bool = False,
    ignore: tuple[str, ...] = (),
) -> None:
    """Raises CheckpointMismatch unless names, shapes and dtypes agree, naming those that don't.

    `saved` maps names to objects with `shape` and `dtype`. With `partial`, `saved` may hold more
    than is wanted and dtypes may differ (arrays are cast). Names that begin as `ignore` says may
    be in it all the same.
    """
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in saved]
    if not partial:
        extra = (n for n in saved if n not in wanted and not n.startswith(ignore))
        problems += [f"{name}: only in the checkpoint" for name in extra]
    for name in wanted.keys() & saved.keys():
        old, new = saved[name], wanted[name]
        if tuple(old.shape) != tuple(new.shape):
            problems.append(f"{name}: shape {tuple(old.shape)} -> {tuple(new.shape)}")
        elif not partial and np.dtype(old.dtype) != np.dtype(new.dtype):
            problems.append(f"{name}: dtype {np.dtype(old.dtype)} -> {np.dtype(new.dtype)}")
    if problems:
        shown = sorted(problems)[:_SHOWN]
        more = len(problems) - len(shown)
        raise CheckpointMismatch(
            f"{where} holds another state than this config makes (checkpoint -> now):\n  "
            + "\n  ".join(shown)
            + (f"\n  ... and {more} more" if more else "")
            + "\nUse the model and optimizer config the checkpoint was made with, or start a new "
            "run with another --run.directory"
        )


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _key_implementation(dtype: Any) -> str:
    """Name of the generator of a key dtype, which prints as `key<fry>`."""
    tag = str(dtype).removeprefix("key<").removesuffix(">")
    if tag not in _KEY_IMPLEMENTATIONS:
        known = ", ".join(_KEY_IMPLEMENTATIONS.values())
        raise ValueError(f"PRNG key dtype {dtype} is unknown, expected one of {known}: use those")
    return _KEY_IMPLEMENTATIONS[tag]
