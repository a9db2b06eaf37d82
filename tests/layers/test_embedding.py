"""Token and position tables, and the output head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig
from mtjax.layers.embedding import Embedding, Head, lookup
from mtjax.sharding import unbox

D, VOCAB = 6, 10
TOKENS = jnp.array([[3, 0, 9], [3, 3, 5]])
POSITIONS = jnp.array([[0, 1, 2], [4, 0, 1]])


def model(**settings):
    return ModelConfig(
        vocab_size=VOCAB,
        vocab_multiple=8,
        embed_dim=D,
        attention=AttentionConfig(num_heads=1),
        **settings,
    )


def embed(config, dtype=jnp.float32):
    """Output and parameters."""
    module = Embedding(config, jnp.dtype(dtype))
    params = unbox(module.init(jax.random.key(0), TOKENS, POSITIONS))
    return np.asarray(module.apply(params, TOKENS, POSITIONS)), params["params"]


def test_a_token_is_its_row_of_the_padded_table():
    out, params = embed(model())
    assert params["embedding"].shape == (16, D)
    np.testing.assert_array_equal(out, np.asarray(params["embedding"])[np.asarray(TOKENS)])


def test_learned_positions_are_added_by_position_not_by_place():
    out, params = embed(model(position="learned", max_positions=5))
    table, places = np.asarray(params["embedding"]), np.asarray(params["position"])
    assert places.shape == (5, D)
    expected = table[np.asarray(TOKENS)] + places[np.asarray(POSITIONS)]
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "factor"), [(jnp.float32, 6**0.5), (jnp.bfloat16, 2.453125)])
def test_the_scale_is_the_root_of_the_width_rounded_to_the_activations_dtype(dtype, factor):
    """sqrt(6) = 2.44949 lies between the bfloat16 numbers 2.4375 and 2.453125."""
    out, params = embed(model(embed_scale=True), dtype)
    rows = np.asarray(params["embedding"].astype(dtype))[np.asarray(TOKENS)].astype(np.float32)
    expected = jnp.asarray(rows * np.float32(factor)).astype(dtype)
    np.testing.assert_array_equal(out, np.asarray(expected))


def test_the_gradient_of_a_row_is_how_often_its_token_occurs():
    table = jnp.zeros((16, D))
    gradient = jax.grad(lambda table: jnp.sum(lookup(table, TOKENS)))(table)
    counts = np.zeros(16)
    counts[[0, 3, 5, 9]] = [1, 3, 1, 1]
    np.testing.assert_array_equal(gradient, counts[:, None] * np.ones(D))


def test_a_tied_head_has_no_table_and_an_untied_one_has_padded_rows():
    x = jnp.ones((1, 2, D), jnp.bfloat16)
    for tied in (True, False):
        head = Head(model(tied_embeddings=tied))
        params = unbox(head.init(jax.random.key(0), x))
        hidden, table = head.apply(params, x)
        np.testing.assert_allclose(np.asarray(hidden, np.float32), 1.0, rtol=2**-8)
        assert ("kernel" in params["params"]) is not tied
        assert table is None if tied else (table.shape, table.dtype) == ((16, D), jnp.bfloat16)
