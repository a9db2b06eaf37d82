"""How text is drawn from a model."""

from mtjax.config.check import config_class, require, require_defaults


@config_class("")
class SamplingConfig:
    """How the next token is drawn."""

    max_tokens: int = 256
    """Tokens to generate at most; an end-of-document token stops earlier."""
    temperature: float = 0.8
    """Logits are divided by this; 0 takes the most likely token."""
    top_k: int = 0
    """Draw among this many of the most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together reach this probability (Holtzman 2020)."""
    seed: int = 0
    """Seed of the draws, from 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        require(self.max_tokens > 0, "max_tokens", self.max_tokens, "at least 1", "raise it")
        require(self.temperature >= 0, "temperature", self.temperature, ">= 0", "0 is greedy")
        require(self.top_k >= 0, "top_k", self.top_k, ">= 0", "0 is all")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]", "1 is all")
        if self.temperature == 0:
            require_defaults(self, "", ["top_k", "top_p"], "temperature is 0")
        # Keys are made of 32 bits: a larger seed would be cut to one of these.
        require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 2**32 - 1", "choose another")
