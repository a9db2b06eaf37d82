"""Our decoder against transformers (eager attention, float32) on tiny random models."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import TrainConfig
from mtjax.parallel.stack import abstract_params, forward
from mtjax.sharding import unbox
from mtjax.training.losses import LossConfig, linear_cross_entropy
from tests.models.hf_names import hf_tree, load_golden, model_from_hf

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("hf_*.npz"))


def test_the_goldens_cover_the_families_we_claim():
    assert {"hf_llama", "hf_qwen3", "hf_gpt2", "hf_gemma2"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_logits_loss_and_gradients_equal_transformers(name):
    hf, arrays = load_golden(GOLDEN / f"{name}.npz")
    model = model_from_hf(hf)
    params = hf_tree(model, hf, _part(arrays, "param/"))
    shapes = jax.tree.map(lambda leaf: leaf.shape, unbox(abstract_params(model)))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == shapes
    tokens_BT = jnp.asarray(arrays["input_ids"])
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    # The last token has no label.
    weights_BT = jnp.ones(tokens_BT.shape, jnp.float32).at[:, -1].set(0.0)
    labels_BT = jnp.roll(tokens_BT, -1, axis=1)

    def loss(params):
        h_BTD, table_VD, _ = forward(
            model, TrainConfig(), params, tokens_BT, positions_BT, None, None
        )
        config = LossConfig(model.vocab_size, model.logit_softcap, 0.0, 10)
        sums = linear_cross_entropy(config, h_BTD, table_VD, labels_BT, weights_BT)
        logits_BTV = h_BTD @ table_VD.T
        return sums.total / jnp.sum(weights_BT), logits_BTV

    (value, logits_BTV), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        jax.tree.map(jnp.asarray, params)
    )
    if model.logit_softcap:
        logits_BTV = model.logit_softcap * jnp.tanh(logits_BTV / model.logit_softcap)
    np.testing.assert_allclose(logits_BTV, arrays["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(value, arrays["loss"], rtol=1e-5)
    expected = hf_tree(model, hf, _part(arrays, "grad/"))

    ours, theirs = (dict(_leaves(tree)) for tree in (gradients, expected))
    # A key bias moves all logits of a query alike, so softmax has no gradient for it: what both
    # hold there is rounding.
    for name in [name for name in theirs if name.endswith("key.bias")]:
        assert max(np.linalg.norm(ours.pop(name)), np.linalg.norm(theirs.pop(name))) < 1e-6
    for name, expected_leaf in theirs.items():
        error = np.linalg.norm(ours[name] - expected_leaf) / np.linalg.norm(expected_leaf)
        assert error < 1e-4, f"{name}: relative error {error:.2e}"


def _leaves(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _part(arrays, prefix):
    return {
        name.removeprefix(prefix): array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
