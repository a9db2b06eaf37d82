"""Multi-token prediction against plain loops, and what counts in its loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import (
    CheckpointConfig,
    Config,
    MoeConfig,
    MtpConfig,
    validate,
)
from mtjax.parallel.stack import Extra, abstract_params, run_model, run_mtp
from mtjax.sharding import unbox
from mtjax.training.mtp import targets_ahead
from tests.parity.layouts import (
    TOLERANCE,
    assert_close,
    changed,
    first_gradients,
    first_state,
    make_batch,
)

DEPTH = 2
MTP = MtpConfig(depth=DEPTH, coefficient=0.4)
PLAIN = changed({"dropout": 0.0, "backend": "xla"}, {"z_loss": 0.0}, packed=True, dropout=0.0)
PACKED = dataclasses.replace(PLAIN, model=dataclasses.replace(PLAIN.model, mtp=MTP))


def test_targets_are_those_of_loops_over_text_and_documents():
    batch = make_batch(PACKED)
    found = targets_ahead(PACKED, batch)
    M, B, T = batch.tokens.shape
    # Tokens of a row with the one that follows the last.
    text = np.concatenate([batch.tokens, batch.labels[..., -1:]], axis=-1)
    for k, ahead in enumerate(found, start=1):
        weights = np.zeros((M, B, T))
        for m, b, t in np.ndindex(M, B, T):
            assert t + k > T or ahead.tokens[m, b, t] == text[m, b, t + k]
            if t + k >= T or batch.segments[m, b, t] != batch.segments[m, b, t + k]:
                continue
            assert ahead.labels[m, b, t] == text[m, b, t + k + 1]
            weights[m, b, t] = batch.weights[m, b, t + k]
        assert 0 < weights.sum() < 0.9 * batch.weights.sum()
        weights *= batch.weights.sum() / weights.sum()
        np.testing.assert_allclose(ahead.weights, weights, rtol=1e-5)


def cross_entropies(h_BTD, table_VD, labels_BT, vocab_size):
    logits = jnp.einsum("BTD,VD->BTV", h_BTD, table_VD)[..., :vocab_size]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels_BT[..., None], axis=-1)[..., 0]


def plain_loss(config, params, batch):
    """Loss and the part of the modules, from whole logits and slices of the text; one microbatch.

    The modules' hidden states come from the model's own code, whose layers other tests check.
    """
    model, batch = config.model, jax.tree.map(lambda x: x[0], batch)
    extra = Extra(batch.segments)
    h_BTD, table_VD, _, _ = run_model(
        model, config.train, params, batch.tokens, batch.positions, extra
    )
    T = batch.tokens.shape[1]
    text = jnp.concatenate([batch.tokens, batch.labels[:, -1:]], axis=1)
    ce = cross_entropies(h_BTD, table_VD, batch.labels, model.vocab_size)
    loss = jnp.sum(batch.weights * ce) / jnp.sum(batch.weights)
    inputs = [jnp.pad(text[:, k:], ((0, 0), (0, k)))[:, :T] for k in range(1, DEPTH + 1)]
    hidden, _ = run_mtp(model, config.train, params, h_BTD, inputs, batch.positions, extra)
    means = []
    for k, h_BTD in enumerate(hidden, start=1):
        ce = cross_entropies(h_BTD[:, :-k], table_VD, text[:, k + 1 :], model.vocab_size)
        weights = batch.weights[:, k:] * (batch.segments[:, k:] == batch.segments[:, :-k])
        means.append(jnp.sum(weights * ce) / jnp.sum(weights))
    mtp = sum(means) / DEPTH
    return loss + 0.4 * mtp, mtp


def test_loss_and_gradients_are_those_of_whole_logits():
    batch, params = make_batch(PACKED), first_state(PACKED).params
    (loss, mtp), gradients = jax.jit(
        jax.value_and_grad(lambda p: plain_loss(PACKED, p, batch), has_aux=True)
    )(params)
    sums, found = first_gradients(PACKED, "data=1")
    weight = np.sum(batch.weights)
    np.testing.assert_allclose(sums.total / weight, loss, rtol=1e-5)
    np.testing.assert_allclose(sums.mtp / weight, mtp, rtol=1e-5)
    assert_close(found, gradients, TOLERANCE)


def test_a_module_reads_the_hidden_state_and_the_token_which_it_predicted():
    """Position 3 of module k is reached by states 0 to 3, and by the tokens up to number 3 + k."""
    model = PACKED.model
    params = first_state(PACKED).params
    tokens_BT = jnp.arange(8)[None]
    h_BTD = jax.random.normal(jax.random.key(1), (1, 8, model.embed_dim))

    @jax.jit
    @functools.partial(jax.jacrev, argnums=(0, 1))
    def jacobians(h_BTD, table_VD):
        own = params | {"embed": {"embedding": table_VD}}
        ahead = [jnp.roll(tokens_BT, -k, axis=1) for k in (1, 2)]
        out, _ = run_mtp(model, PACKED.train, own, h_BTD, ahead, tokens_BT, Extra())
        return jnp.stack([jnp.sum(jnp.square(x[0, 3])) for x in out])

    of_hidden, of_table = jacobians(h_BTD, jnp.asarray(params["embed"]["embedding"]))
    for k in (1, 2):
        states, tokens = (
            np.flatnonzero(np.abs(g).sum(-1)).tolist()
            for g in (of_hidden[k - 1, 0], of_table[k - 1])
        )
        assert states == [0, 1, 2, 3]
        assert tokens == list(range(1, 4 + k))


def test_the_model_itself_is_drawn_and_evaluated_as_without_modules():
    state, expected = first_state(PACKED), first_state(PLAIN)
    assert set(state.params) - set(expected.params) == {"mtp"}
    for name in expected.params:
        jax.tree.map(np.testing.assert_array_equal, state.params[name], expected.params[name])
    sums, without = first_gradients(PACKED, "data=1")[0], first_gradients(PLAIN, "data=1")[0]
    np.testing.assert_allclose(sums.cross_entropy, without.cross_entropy, rtol=1e-6)
    np.testing.assert_allclose(sums.total, without.total + 0.4 * sums.mtp, rtol=1e-6)


def test_modules_are_stacked_by_depth():
    shapes = unbox(abstract_params(PACKED.model))["mtp"]
    assert shapes["hidden"]["kernel"].shape == (DEPTH, 32, 32)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(shapes)} == {DEPTH}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MtpConfig(depth=-1), r"model\.mtp\.depth: got -1"),
        (lambda: MtpConfig(coefficient=0.1), r"model\.mtp\.coefficient: .*depth is 0"),
        (lambda: MtpConfig(depth=1, coefficient=0.0), "above 0"),
        (
            lambda: changed(mtp=MTP, position="learned", max_positions=16),
            r"model\.mtp\.depth: got 2, expected 0 with learned positions",
        ),
        (
            lambda: validate(
                Config(
                    model=changed(mtp=MTP, moe=MoeConfig(num_experts=4)).model,
                    checkpoint=CheckpointConfig(upcycle_from="runs/dense"),
                )
            ),
            r"checkpoint\.upcycle_from: .* empty with model\.mtp",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
