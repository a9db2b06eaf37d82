"""A feed-forward part made of experts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from mtjax.config.model import ModelConfig
from mtjax.config.moe import MoeConfig
from mtjax.layers.dispatch import KERNEL_NAMES, Kernels, run_experts
from mtjax.layers.init import normal
from mtjax.layers.linear import Gathered, Linear, named
from mtjax.layers.mlp import Mlp
from mtjax.layers.router import Router, RouterStats
from mtjax.precision.product import QuantizedKernel
from mtjax.sharding import Product, shard

_SPLIT = ("batch", "seq_sp", None)


class Moe(nn.Module):
    """sum_k weight_k * expert_k(x), over the experts that the router chooses, + shared(x)."""

    model: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        counts_BT: jax.Array | None,
        load_E: jax.Array | None,
        keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterStats]:
        """Output [B, T, D], sequence-parallel as the input, and the router's statistics.

        `counts_BT`: bool, False where a position holds padding: it gets 0, and nothing it holds,
        NaN included, reaches an expert, a load or a loss; None: all count. `load_E` and `keys_B`
        as Router takes them.
        """
        model = self.model
        x_BTD = shard(x_BTD, *_SPLIT)
        if counts_BT is None:
            counts_BT = jnp.ones(x_BTD.shape[:2], bool)
        counts_BT = shard(counts_BT, *_SPLIT[:2])
        x_BTD = jnp.where(counts_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype))
        routing, stats = Router(model, name="router")(x_BTD, counts_BT, load_E, keys_B)
        y_BTD = run_experts(model, x_BTD, routing, self._kernels(x_BTD.dtype))
        if model.moe.shared_ffn_dim:
            y_BTD += self._shared(x_BTD)
        return y_BTD, stats

    def _kernels(self, dtype: jnp.dtype) -> Kernels:
        """Kernels, in the compute dtype or quantised, and biases of all experts."""
        model = self.model
        E, D, F = model.moe.num_experts, model.embed_dim, model.expert_dim
        inner = normal(model.init_std)
        outer = normal(model.init_std / (2 * model.num_layers) ** 0.5)
        leaves: dict[str, tuple[tuple[int, ...], Callable]] = {
            "up": ((E, D, F), inner),
            "down": ((E, F, D), outer),
        }
        if model.gated:
            leaves["gate"] = leaves["up"]
        if model.mlp_bias:
            zeros = nn.initializers.zeros
            leaves |= {f"{name}_bias": ((E, s[-1]), zeros) for name, (s, _) in leaves.items()}
        kernels = {}
        for name, (shape, init) in leaves.items():
            use = Product("ffn_out" if name == "down" else "ffn_in", 1) if len(shape) > 2 else None
            kernel = self.param(name, named(init, KERNEL_NAMES[name], use), shape, jnp.float32)
            quantized = isinstance(kernel, QuantizedKernel)
            kernels[name] = kernel if quantized else kernel.astype(dtype)
        return kernels

    def _shared(self, x_BTD: jax.Array) -> jax.Array:
        """What the expert that sees every token gives, scaled by its gate if it has one."""
        model = self.model
        dense = dataclasses.replace(model, ffn_dim=model.moe.shared_ffn_dim, moe=MoeConfig())
        y_BTD = shard(Mlp(dense, name="shared")(Gathered(x_BTD)), *_SPLIT)
        if not model.moe.shared_gate:
            return y_BTD
        gate = Linear((1,), ("embed", None), model.init_std, name="shared_gate")
        return y_BTD * jax.nn.sigmoid(gate(x_BTD))
