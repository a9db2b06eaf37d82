"""Sampling with a key-value cache."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtjax.config import ModelConfig, TrainConfig
from mtjax.config.check import require
from mtjax.config.sampling import SamplingConfig
from mtjax.layers.attention import Cache
from mtjax.parallel.stack import Params, forward, init_caches
from mtjax.sharding import RULES, axis_size, compute_shardings, override_rules

_PROMPT_MULTIPLE = 32  # prompts are padded to this, so that few lengths are compiled


def filter_logits(logits_BV: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Logits at the temperature, with tokens outside top-k and top-p at -inf."""
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kth = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        order_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probability_BV = jax.nn.softmax(order_BV, axis=-1)
        # Keep a token if those before it don't reach top_p: the first one always stays.
        before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
        last = jnp.sum(before_BV < sampling.top_p, axis=-1, keepdims=True) - 1
        threshold = jnp.take_along_axis(order_BV, last, axis=-1)
        logits_BV = jnp.where(logits_BV < threshold, -jnp.inf, logits_BV)
    return logits_BV


def decoding_rules(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """How logical dims are laid out while decoding on the current mesh.

    One sequence: nothing to split by batch or sequence; heads and vocabulary stay split. Token by
    token a pipeline would run one stage at a time, so its devices hold pieces of every layer; those
    of the context axis hold pieces as in training, but every token.
    """
    rules: dict[str, tuple[str, ...]] = {"batch": (), "seq": (), "seq_sp": (), "stages": ()}
    embed = (*RULES["embed"], "pipeline")
    if model.embed_dim % math.prod(axis_size(axis) for axis in embed) == 0:
        rules["embed"] = embed
    return rules


def decoding_shardings(model: ModelConfig, boxes: Params, mesh: Mesh) -> Any:
    """Sharding of each parameter for `generate`."""
    with jax.set_mesh(mesh), override_rules(**decoding_rules(model)):
        return compute_shardings(boxes, mesh)


def check_lengths(
    model: ModelConfig,
    prompt: Sequence[int],
    max_tokens: int,
    names: tuple[str, str] = ("prompt", "max_tokens"),
) -> None:
    """Refuse what the model can't continue; known before there are parameters.

    `names` are those of the two values where the user gives them.

    Raises:
        ValueError: the model isn't causal, the prompt is empty or holds an id beyond the
            vocabulary, or prompt and text would outgrow a learned position table.
    """
    require(
        model.moe.router != "expert_choice",
        "model.moe.router",
        "expert_choice",
        "another router to generate text: with it, who serves a token depends on tokens that "
        "aren't there yet",
        "no text comes of this model; a run leaves it out with train.sample_tokens 0",
    )
    require(len(prompt) > 0, names[0], prompt, "at least one token", "give a text to continue")
    worst = max(prompt)
    require(
        worst < model.vocab_size,
        names[0],
        worst,
        f"ids below model.vocab_size ({model.vocab_size})",
        "use the tokenizer that the model was trained with",
    )
    require(
        model.max_positions is None or len(prompt) + max_tokens <= model.max_positions,
        names[1],
        max_tokens,
        f"{len(prompt)} tokens of prompt and the text within model.max_positions "
        f"({model.max_positions})",
        "ask for fewer tokens",
    )


def generate(
    model: ModelConfig,
    params: Params,
    mesh: Mesh,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    eod: int | None = None,
) -> list[int]:
    """Ids that continue the prompt, without it and without the end-of-document id.

    `params` hold the compute dtype, laid out by `decoding_shardings`.

    Raises:
        ValueError: the prompt is empty or holds an id beyond the vocabulary, or the text would
            outgrow a learned position table.
    """
    check_lengths(model, prompt, sampling.max_tokens)
    padded = -(-len(prompt) // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    length = max(padded, len(prompt) + sampling.max_tokens)
    # The backend that reads a cache; and no token may lose an expert to the padding.
    model = model.with_attention("xla").with_dispatcher("allgather")
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(prompt)] = prompt
    with jax.set_mesh(mesh), override_rules(**decoding_rules(model)):
        run = jax.jit(partial(_generate, model, sampling, length, -1 if eod is None else eod))
        out = np.asarray(run(params, tokens, len(prompt), jax.random.key(sampling.seed)))
    ids = out[: sampling.max_tokens].tolist()
    return ids[: ids.index(eod)] if eod in ids else ids


def _generate(
    model: ModelConfig,
    sampling: SamplingConfig,
    length: int,
    eod: int,
    params: Params,
    tokens_BT: jax.Array,
    prompt_length: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Ids [max_tokens] of one sequence, `eod` from the end of the document on."""
    dtype = params["embed"]["embedding"].dtype

    def run(tokens_BT: jax.Array, start: Any, caches: Any) -> tuple[jax.Array, jax.Array, Any]:
        positions_BT = start + jnp.arange(tokens_BT.shape[1])[None]
        return forward(model, TrainConfig(), params, tokens_BT, positions_BT, None, None, caches)

    def draw(h_D: jax.Array, table_VD: jax.Array, step: Any) -> jax.Array:
        logits_V = (table_VD @ h_D).astype(jnp.float32)
        if model.logit_softcap:
            logits_V = model.logit_softcap * jnp.tanh(logits_V / model.logit_softcap)
        logits_V = logits_V[: model.vocab_size]
        if sampling.temperature == 0:
            return jnp.argmax(logits_V).astype(jnp.int32)
        filtered = filter_logits(logits_V[None], sampling)[0]
        return jax.random.categorical(jax.random.fold_in(key, step), filtered).astype(jnp.int32)

    caches = init_caches(model, 1, length, dtype)
    h_BTD, table_VD, caches = run(tokens_BT, 0, caches)
    # The padding behind the prompt is in the cache too; what follows overwrites it.
    caches = jax.tree.map(
        lambda cache: cache._replace(length=jnp.full_like(cache.length, prompt_length)),
        caches,
        is_leaf=lambda x: isinstance(x, Cache),
    )
    first = draw(h_BTD[0, prompt_length - 1], table_VD, 0)
    out = jnp.full((sampling.max_tokens,), eod, jnp.int32).at[0].set(first)

    def going_on(carry: Any) -> jax.Array:
        step, token, *_ = carry
        return (step < sampling.max_tokens) & (token != eod)

    def one(carry: Any) -> Any:
        step, token, caches, out = carry
        h_BTD, table_VD, caches = run(token[None, None], prompt_length + step - 1, caches)
        token = draw(h_BTD[0, 0], table_VD, step)
        return step + 1, token, caches, out.at[step].set(token)

    return jax.lax.while_loop(going_on, one, (1, first, caches, out))[3]
