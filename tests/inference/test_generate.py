"""Generation with a cache against plain forward passes, and the filters against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, MlaConfig, ModelConfig, MoeConfig, TrainConfig
from mtjax.config.mesh import MeshConfig
from mtjax.config.sampling import SamplingConfig
from mtjax.inference.generate import check_lengths, filter_logits, generate
from mtjax.parallel.stack import abstract_params, forward, init_params
from mtjax.sharding import compute_shardings, make_mesh, unbox

pytestmark = pytest.mark.usefixtures("compilation_cache")

BASE = ModelConfig(
    vocab_size=97,
    embed_dim=32,
    num_layers=3,
    ffn_dim=48,
    attention=AttentionConfig(num_heads=4, backend="xla"),
    init_std=0.4,  # so large that the most likely token changes from place to place
)
MODELS = {
    "rope": BASE,
    "grouped-query": dataclasses.replace(
        BASE, attention=AttentionConfig(num_heads=4, num_kv_heads=2, qk_norm=True, backend="xla")
    ),
    "windows": dataclasses.replace(
        BASE,
        attention=AttentionConfig(
            num_heads=4,
            num_kv_heads=1,
            windows=(5, 0),
            logit_softcap=20.0,
            sinks=True,
            backend="xla",
        ),
        post_norm=True,
        logit_softcap=10.0,
    ),
    "learned-tied": dataclasses.replace(
        BASE, position="learned", max_positions=64, tied_embeddings=True, norm="layernorm"
    ),
    "no-positions": dataclasses.replace(BASE, position="none"),
    "latent": dataclasses.replace(
        BASE,
        num_layers=1,
        attention=AttentionConfig(
            num_heads=4,
            mla=MlaConfig(kv_rank=12, q_rank=20, nope_dim=6, rope_dim=4, value_dim=10),
            backend="xla",
        ),
    ),
    # At this capacity tokens would be dropped in training; the reference drops none.
    "experts": dataclasses.replace(
        BASE,
        num_layers=2,
        moe=MoeConfig(num_experts=4, router="sigmoid", score_bias=True, capacity_factor=0.5),
    ),
}
PROMPT = [5, 96, 17, 17, 3, 42, 8]
NUM_NEW = 40  # beyond one padded prompt, and beyond the window


def parameters(model):
    """Random weights; rows of the table beyond the vocabulary would win if they were looked at."""
    params = unbox(init_params(model, jax.random.key(1)))
    part, name = ("embed", "embedding") if model.tied_embeddings else ("head", "kernel")
    table_VD = params[part][name]
    tail = model.padded_vocab_size - model.vocab_size
    params[part][name] = table_VD.at[model.vocab_size :].set(10 * table_VD[:tail])
    return params


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def greedy_without_cache(model, params, prompt, num_new):
    """Each token from a forward pass over the whole text before it."""
    length = len(prompt) + num_new

    @jax.jit
    def logits_TV(tokens_BT):
        positions_BT = jnp.arange(length)[None]
        h_BTD, table_VD, _ = forward(model, TrainConfig(), params, tokens_BT, positions_BT)
        return h_BTD[0] @ table_VD.T

    ids = list(prompt)
    while len(ids) < length:
        # What stands behind the text does not reach back to it.
        tokens_BT = np.array([ids + [0] * (length - len(ids))], np.int32)
        row_V = np.asarray(logits_TV(tokens_BT))[len(ids) - 1, : model.vocab_size]
        ids.append(int(np.argmax(row_V)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "name",
    [
        # tests/layers/test_mla.py compares the cache itself in CI.
        pytest.param(name, marks=pytest.mark.nightly) if name == "latent" else name
        for name in MODELS
    ],
)
def test_greedy_text_is_the_argmax_of_full_forward_passes_token_by_token(name):
    model = MODELS[name]
    params = parameters(model)
    sampling = SamplingConfig(max_tokens=NUM_NEW, temperature=0.0)
    ids = generate(model, params, one_device(), PROMPT, sampling)
    reference = model.with_dispatcher("dropless")
    assert ids == greedy_without_cache(reference, params, PROMPT, NUM_NEW)
    assert len(set(ids)) > 3


def test_a_prompt_longer_than_one_padding_and_one_of_exactly_its_length():
    params = parameters(BASE)
    for length in (32, 33, 50):
        prompt = [(7 * i) % 97 for i in range(length)]
        sampling = SamplingConfig(max_tokens=3, temperature=0.0)
        ids = generate(BASE, params, one_device(), prompt, sampling)
        assert ids == greedy_without_cache(BASE, params, prompt, 3)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("grouped-query", MeshConfig(tensor=2)),
        ("grouped-query", MeshConfig(context=2)),
        pytest.param("latent", MeshConfig(tensor=2), marks=pytest.mark.nightly),
        ("experts", MeshConfig(expert=2, tensor=2)),
        pytest.param("experts", MeshConfig(expert=2, context=2), marks=pytest.mark.nightly),
    ],
)
def test_a_mesh_generates_the_same_ids(name, mesh):
    model = MODELS[name]
    params = parameters(model)
    mesh = make_mesh(mesh, jax.devices()[: 2 * mesh.expert])
    with jax.set_mesh(mesh):
        shardings = compute_shardings(abstract_params(model), mesh)
    split = jax.device_put(params, shardings)
    for sampling in (
        SamplingConfig(max_tokens=12, temperature=0.0),
        SamplingConfig(max_tokens=12, temperature=1.0, top_k=20, top_p=0.9, seed=3),
    ):
        alone = generate(model, params, one_device(), PROMPT, sampling)
        assert generate(model, split, mesh, PROMPT, sampling) == alone


def test_the_seed_decides_and_padded_ids_are_never_drawn():
    params = parameters(BASE)

    def draw(seed):
        sampling = SamplingConfig(max_tokens=30, temperature=50.0, seed=seed)
        return generate(BASE, params, one_device(), PROMPT, sampling)

    first, second, again = draw(0), draw(1), draw(0)
    assert first == again != second
    assert len(set(first + second)) > 30  # hot enough to reach all of the vocabulary
    assert max(first + second) < 97


def test_one_candidate_left_by_top_k_or_top_p_is_greedy():
    params = parameters(BASE)
    mesh = one_device()
    greedy = generate(BASE, params, mesh, PROMPT, SamplingConfig(max_tokens=8, temperature=0.0))
    for fields in ({"top_k": 1}, {"top_p": 1e-6}):
        sampling = SamplingConfig(max_tokens=8, temperature=1.5, **fields)
        assert generate(BASE, params, mesh, PROMPT, sampling) == greedy


def test_the_end_of_a_document_ends_the_text_and_is_left_out():
    params = parameters(BASE)
    sampling = SamplingConfig(max_tokens=12, temperature=0.0)
    ids = generate(BASE, params, one_device(), PROMPT, sampling)
    eod = ids[4]
    assert generate(BASE, params, one_device(), PROMPT, sampling, eod) == ids[: ids.index(eod)]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [([], 4, "at least one token"), ([97], 4, "ids below"), ([1] * 60, 5, "max_positions")],
)
def test_what_cannot_be_continued_is_refused(prompt, max_tokens, expected):
    model = MODELS["learned-tied"]
    params = unbox(init_params(model, jax.random.key(0)))
    with pytest.raises(ValueError, match=expected):
        generate(model, params, one_device(), prompt, SamplingConfig(max_tokens=max_tokens))


def filtered_by_hand(logits_V, temperature, top_k, top_p):
    """{id: scaled logit} of the tokens that stay, one at a time from the most likely on."""
    scaled_V = logits_V.astype(np.float64) / temperature
    order = np.argsort(-scaled_V)
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled_V[order] - scaled_V[order].max())
    weights /= weights.sum()
    kept, total = {}, 0.0
    for token, weight in zip(order, weights, strict=True):
        if total >= top_p:
            break
        kept[int(token)] = scaled_V[token]
        total += weight
    return kept


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 7, 1.0), (2.0, 0, 0.6), (0.7, 9, 0.8), (1.0, 500, 0.95)],
)
def test_filters_keep_what_numpy_keeps(temperature, top_k, top_p):
    logits_BV = np.random.default_rng(0).normal(0, 3, (4, 50)).astype(np.float32)
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    got_BV = np.asarray(filter_logits(jnp.asarray(logits_BV), sampling))
    for got_V, logits_V in zip(got_BV, logits_BV, strict=True):
        expected = filtered_by_hand(logits_V, temperature, top_k, top_p)
        assert set(np.flatnonzero(np.isfinite(got_V))) == set(expected)
        for token, value in expected.items():
            np.testing.assert_allclose(got_V[token], value, rtol=1e-6)


def test_draws_follow_the_probabilities():
    """All tokens look alike to this model, so that each draw is from the same distribution."""
    model = dataclasses.replace(BASE, vocab_size=2, vocab_multiple=2, position="none")
    params = unbox(init_params(model, jax.random.key(1)))
    table_VD = params["embed"]["embedding"]
    params["embed"]["embedding"] = jnp.broadcast_to(table_VD[:1], table_VD.shape)
    h_BTD, head_VD, _ = forward(model, TrainConfig(), params, jnp.array([[1]]), jnp.array([[0]]))
    logits_V = np.asarray(h_BTD[0, 0] @ head_VD.T, np.float64) / 4
    expected = 1 / (1 + np.exp(logits_V[0] - logits_V[1]))
    assert 0.1 < expected < 0.9
    sampling = SamplingConfig(temperature=4.0, max_tokens=400)
    drawn = generate(model, params, one_device(), [1], sampling)
    # Three standard deviations of a binomial share of 400 draws.
    assert abs(np.mean(drawn) - expected) < 3 * (expected * (1 - expected) / 400) ** 0.5


def test_a_model_whose_experts_choose_tokens_generates_nothing():
    """Who serves a token would depend on those behind it."""
    moe = MoeConfig(num_experts=4, router="expert_choice", renormalize=False)
    with pytest.raises(ValueError, match="depends on tokens that aren't there yet"):
        check_lengths(dataclasses.replace(BASE, moe=moe), [1], 1)
