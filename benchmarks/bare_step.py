"""A hand-written training step in plain jax.numpy: the yardstick of cpu_step.py.

The same decoder, loss and optimizer as mtjax builds from its recipe, with nothing around them: no
mesh, no padding, no masks, no skipped steps. `unrolled` writes the layers out.
"""

from functools import partial

import jax
import jax.numpy as jnp

VOCAB, EMBED, LAYERS, HEADS, HEAD_DIM, FFN = 512, 256, 4, 4, 64, 1024


def init(key: jax.Array) -> dict:
    """Parameters, layers stacked."""
    shapes = {
        "q": (LAYERS, EMBED, HEADS * HEAD_DIM),
        "k": (LAYERS, EMBED, HEADS * HEAD_DIM),
        "v": (LAYERS, EMBED, HEADS * HEAD_DIM),
        "o": (LAYERS, HEADS * HEAD_DIM, EMBED),
        "gate": (LAYERS, EMBED, FFN),
        "up": (LAYERS, EMBED, FFN),
        "down": (LAYERS, FFN, EMBED),
    }
    keys = dict(zip([*shapes, "embed", "head"], jax.random.split(key, 9), strict=True))
    layers = {name: 0.02 * jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    layers |= {name: jnp.ones((LAYERS, EMBED)) for name in ("norm1", "norm2")}
    return {
        "embed": 0.02 * jax.random.normal(keys["embed"], (VOCAB, EMBED)),
        "layers": layers,
        "norm": jnp.ones(EMBED),
        "head": 0.02 * jax.random.normal(keys["head"], (EMBED, VOCAB)),
    }


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def rotate(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x, p, cos, sin, mask):
    B, T, _ = x.shape
    h = rms_norm(x, p["norm1"])
    q, k, v = ((h @ p[name]).reshape(B, T, HEADS, HEAD_DIM) for name in "qkv")
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * HEAD_DIM**-0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(B, T, -1)
    x = x + out @ p["o"]
    h = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss_fn(params, tokens, labels, unrolled):
    T = tokens.shape[1]
    angles = jnp.arange(T)[:, None, None] * 10000.0 ** (-jnp.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    cos, sin, mask = jnp.cos(angles), jnp.sin(angles), jnp.tril(jnp.ones((T, T), bool))
    x = params["embed"][tokens]
    if unrolled:
        for i in range(LAYERS):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], params["layers"]), cos, sin, mask)
    else:
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p, cos, sin, mask), None), x, params["layers"])
    logits = rms_norm(x, params["norm"]) @ params["head"]
    label_logit = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - label_logit)


def init_state(key: jax.Array) -> dict:
    """Parameters, AdamW moments and the step."""
    params = init(key)
    m, v = (jax.tree.map(lambda p: jnp.array(0.0 * p), params) for _ in range(2))
    return {"params": params, "m": m, "v": v, "step": jnp.int32(0)}


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def train_step(state, tokens, labels, unrolled):
    """One AdamW step with clipping by global norm, constant rate, decay 0.1 on all weights."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens, labels, unrolled)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    shrink = jnp.minimum(1.0, 1.0 / norm)
    step = state["step"] + 1
    lr, b1, b2, eps, decay = 3e-4, 0.9, 0.95, 1e-8, 0.1

    def update(p, g, m, v):
        g = g * shrink
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        direction = (m / (1 - b1**step)) / (jnp.sqrt(v / (1 - b2**step)) + eps)
        return p - lr * (direction + decay * p), m, v

    moved = jax.tree.map(update, state["params"], grads, state["m"], state["v"])
    take = lambda i: jax.tree.map(lambda t: t[i], moved, is_leaf=lambda t: isinstance(t, tuple))  # noqa: E731
    return {"params": take(0), "m": take(1), "v": take(2), "step": step}, loss
