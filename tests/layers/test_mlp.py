"""The feed-forward part against its formula in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig
from mtjax.layers.mlp import Mlp
from mtjax.sharding import unbox

D, F = 4, 6


def gelu_tanh(x):
    """Hendrycks & Gimpel 2016 (arXiv 1606.08415), section 2."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "swiglu": lambda x: x / (1 + np.exp(-x)),
    "geglu": gelu_tanh,
    "gelu": gelu_tanh,
    "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def model(**settings):
    return ModelConfig(embed_dim=D, ffn_dim=F, attention=AttentionConfig(num_heads=2), **settings)


@pytest.mark.parametrize("name", [*ACTIVATIONS, "clamped_swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_activation_follows_its_formula(name, bias):
    clamp = {"activation_clamp": 0.9} if name == "clamped_swiglu" else {}
    mlp = Mlp(model(activation=name, mlp_bias=bias, **clamp))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, D))
    shapes = unbox(jax.eval_shape(mlp.init, jax.random.key(0), jnp.zeros((2, 3, D))))["params"]
    params = jax.tree.map(lambda s: rng.normal(size=s.shape), shapes)
    gated = name in ("swiglu", "geglu", "clamped_swiglu")
    assert set(params) == ({"gate", "up", "down"} if gated else {"up", "down"})

    def project(part, y):
        return y @ params[part]["kernel"] + (params[part]["bias"] if bias else 0.0)

    if name == "clamped_swiglu":
        gate = np.minimum(project("gate", x), 0.9)
        inner = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(project("up", x), -0.9, 0.9) + 1)
    else:
        act = ACTIVATIONS[name]
        inner = act(project("gate", x)) * project("up", x) if gated else act(project("up", x))
    single = jax.tree.map(np.float32, params)
    got = mlp.apply({"params": single}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, project("down", inner), atol=3e-5)


def test_the_output_projection_starts_smaller_by_the_root_of_twice_the_depth():
    """Radford et al. 2019, section 2.3: two additions to the residual stream per layer."""
    wide = ModelConfig(embed_dim=256, ffn_dim=256, num_layers=8, init_std=0.1)
    params = unbox(Mlp(wide).init(jax.random.key(0), jnp.zeros((1, 1, 256))))["params"]
    assert np.std(params["up"]["kernel"]) == pytest.approx(0.1, rel=0.02)
    assert np.std(params["down"]["kernel"]) == pytest.approx(0.1 / 4, rel=0.02)
