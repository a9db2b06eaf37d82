"""Multi-head latent attention: how wide its latents and its heads are."""

import dataclasses

from mtjax.config.check import config_class, require, require_defaults


@config_class("model.attention.mla")
class MlaConfig:
    """Keys and values made from one small latent vector per token (DeepSeek-V2, arXiv 2405.04434).

    With `kv_rank` 0 attention projects keys and values directly, and every other field is 0.
    """

    kv_rank: int = 0
    """Width of the latent that the keys and values of all heads are made from; 0 is no latent."""
    q_rank: int = 0
    """Width of the latent that queries are made from; 0 projects them directly (V2-Lite)."""
    nope_dim: int = 0
    """Part of a query or key head without position."""
    rope_dim: int = 0
    """Part of a query or key head that rotates, even; that of the key is shared by all heads."""
    value_dim: int = 0
    """Width of a value head."""

    def __post_init__(self) -> None:
        names = [f.name for f in dataclasses.fields(self) if f.name != "kv_rank"]
        if self.kv_rank == 0:
            require_defaults(self, "model.attention.mla", names, "kv_rank is 0")
            return
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            value = getattr(self, name)
            fix = "DeepSeek has kv_rank 512, nope_dim 128, rope_dim 64, value_dim 128"
            require(value > 0, f"model.attention.mla.{name}", value, "above 0 with a latent", fix)
        require(
            self.rope_dim % 2 == 0,
            "model.attention.mla.rope_dim",
            self.rope_dim,
            "an even number, as it rotates in pairs",
            "change it",
        )
        require(
            self.q_rank >= 0,
            "model.attention.mla.q_rank",
            self.q_rank,
            "at least 0",
            "0 projects queries directly",
        )
