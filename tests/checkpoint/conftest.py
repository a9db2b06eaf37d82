"""A toy training state of sharded arrays for the checkpoint tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SHARDINGS = {
    (64, 32): PartitionSpec("fsdp", "tensor"),
    (32,): PartitionSpec("fsdp"),
}


class Toy:
    """Builds, describes, trains and compares the toy state."""

    def mesh(self, fsdp: int, tensor: int) -> Mesh:
        return jax.make_mesh(
            (fsdp, tensor),
            ("fsdp", "tensor"),
            axis_types=(AxisType.Auto,) * 2,
            devices=jax.devices()[: fsdp * tensor],
        )

    def abstract(self, mesh: Mesh, width: int = 64):
        """ShapeDtypeStructs of the state on `mesh`."""

        def place(leaf):
            spec = SHARDINGS.get(leaf.shape, PartitionSpec())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, jax.eval_shape(lambda: self._init(width)))

    def state(self, mesh: Mesh, width: int = 64):
        """The state after initialisation, with moments that are not zero."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(mesh, width))
        return jax.jit(lambda: self._init(width), out_shardings=shardings)()

    def _init(self, width: int):
        key_w, key_g, key_train = jax.random.split(jax.random.key(7), 3)
        params = {
            "dense": {
                "kernel": jax.random.normal(key_w, (width, 32)),
                "bias": jnp.linspace(0.0, 1.0, 32),
            },
            "scale_bf16": jnp.full((3,), 1.5, jnp.bfloat16),
        }
        optimizer = optax.adamw(1e-2)
        grads = jax.tree.map(lambda p: jax.random.normal(key_g, p.shape, p.dtype), params)
        _, opt = optimizer.update(grads, optimizer.init(params), params)
        return {"params": params, "opt": opt, "step": jnp.int32(5), "key": key_train}

    def assert_equal(self, got, expected) -> None:
        """Same tree, dtypes and bits."""
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert one.dtype == two.dtype
            if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, two = jax.random.key_data(one), jax.random.key_data(two)
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.fixture
def toy() -> Toy:
    return Toy()
