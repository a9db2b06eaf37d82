"""Our decoder against transformers (eager attention, float32) on tiny random models."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import Config, TrainConfig
from mtjax.parallel.stack import Extra, abstract_params, run_model, run_mtp
from mtjax.sharding import unbox
from mtjax.training.losses import LossConfig, linear_cross_entropy
from mtjax.training.mtp import targets_ahead, with_mtp_loss
from mtjax.training.step import StepInput
from tests.models.hf_names import hf_tree, load_golden, model_from_hf

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("hf_*.npz"))
FAST = {"xla_backend_optimization_level": 0}
EXPERTS = ("hf_mixtral", "hf_qwen2_moe", "hf_qwen3_moe", "hf_dots1", "hf_gpt_oss")
LATENT = ("hf_deepseek_v2", "hf_deepseek_v3", "hf_deepseek_v3_mtp")


def test_the_goldens_cover_the_families_we_claim():
    assert {"hf_llama", "hf_qwen3", "hf_gpt2", "hf_gemma2"} <= set(FILES)
    assert {*EXPERTS, *LATENT} <= set(FILES)


CASES = [(name, "capacity") for name in FILES if name != "hf_deepseek_v2"]
CASES += [pytest.param("hf_deepseek_v2", "capacity", marks=pytest.mark.nightly)]
CASES += [("hf_mixtral", "dropless"), ("hf_dots1", "allgather"), ("hf_gpt_oss", "dropless")]
CASES += [
    pytest.param(name, other, marks=pytest.mark.nightly)
    for name in EXPERTS
    for other in ("dropless", "allgather")
    if (name, other) not in CASES
]


@pytest.mark.parametrize(("name", "dispatcher"), CASES)
def test_logits_loss_and_gradients_equal_transformers(name, dispatcher):
    hf, arrays = load_golden(GOLDEN / f"{name}.npz")
    model = model_from_hf(hf)
    if dispatcher != "capacity":
        model = model.with_dispatcher(dispatcher)
    params = hf_tree(model, hf, _part(arrays, "param/"))
    shapes = jax.tree.map(lambda leaf: leaf.shape, unbox(abstract_params(model)))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == shapes
    tokens_BT = jnp.asarray(arrays["input_ids"])
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    # The last token has no label.
    weights_BT = jnp.ones(tokens_BT.shape, jnp.float32).at[:, -1].set(0.0)
    labels_BT = jnp.roll(tokens_BT, -1, axis=1)

    def loss(params):
        h_BTD, table_VD, _, stats = run_model(
            model, TrainConfig(), params, tokens_BT, positions_BT, Extra()
        )
        config = LossConfig(model.vocab_size, model.logit_softcap, 0.0, 10)
        sums = linear_cross_entropy(config, h_BTD, table_VD, labels_BT, weights_BT)
        if model.mtp.depth:
            batch = StepInput(tokens_BT, labels_BT, weights_BT, positions_BT, None, None, None)
            ahead = targets_ahead(Config(model=model), batch)
            tokens = [targets.tokens for targets in ahead]
            hidden, _ = run_mtp(model, TrainConfig(), params, h_BTD, tokens, positions_BT, Extra())
            sums = with_mtp_loss(Config(model=model), sums, hidden, table_VD, ahead)
        logits_BTV = h_BTD @ table_VD.T
        return sums.total / jnp.sum(weights_BT), (logits_BTV, stats)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=FAST)
    (value, (logits_BTV, stats)), gradients = run(jax.tree.map(jnp.asarray, params))
    if model.logit_softcap:
        logits_BTV = model.logit_softcap * jnp.tanh(logits_BTV / model.logit_softcap)
    np.testing.assert_allclose(logits_BTV, arrays["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(value, arrays["loss"], rtol=1e-5)
    if "balance" in arrays:
        # A mean over tokens; transformers leaves out the division by k.
        found = [layer.balance for layer in _layers(stats)]
        per_token = model.moe.top_k * np.concatenate(found) / tokens_BT.size
        np.testing.assert_allclose(per_token, arrays["balance"], rtol=1e-5)
    # Router biases choose experts but weight nothing: they have no gradient.
    biases = {
        name.replace("param/", "grad/"): np.zeros_like(array)
        for name, array in arrays.items()
        if name.endswith("e_score_correction_bias")
    }
    expected = hf_tree(model, hf, _part(arrays | biases, "grad/"))

    ours, theirs = (dict(_leaves(tree)) for tree in (gradients, expected))
    # Without rotation a key bias moves all logits of a query alike, so softmax has no gradient
    # for it: what both hold there is rounding.
    free = "key.bias" if model.position != "rope" else "none"
    for name in [name for name in theirs if name.endswith(free)]:
        assert max(np.linalg.norm(ours.pop(name)), np.linalg.norm(theirs.pop(name))) < 1e-6
    for name in [name for name in theirs if name.endswith("router.bias")]:
        assert not np.any(ours.pop(name)) and not np.any(theirs.pop(name))
    for name, expected_leaf in theirs.items():
        error = np.linalg.norm(ours[name] - expected_leaf) / np.linalg.norm(expected_leaf)
        assert error < 1e-4, f"{name}: relative error {error:.2e}"


def _layers(stats):
    return [s for group in stats.values() for s in group.values() if s is not None]


def _leaves(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _part(arrays, prefix):
    return {
        name.removeprefix(prefix): array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
