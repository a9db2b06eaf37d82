"""Mixture of experts: how many, who chooses them, and how tokens reach them."""

import dataclasses
import math
from typing import Literal

from mtjax.config.check import config_class, require, require_defaults

RouterKind = Literal["softmax", "softmax_after_topk", "sigmoid", "sinkhorn", "expert_choice"]
Dispatcher = Literal["capacity", "dropless", "allgather"]
SEQUENCE_ROUTERS = ("sinkhorn", "expert_choice")
"""Routers that look at all tokens of a sequence at once."""

BalanceScope = Literal["microbatch", "sequence", "global"]


@config_class("model.moe")
class MoeConfig:
    """Feed-forward parts made of experts, of which each token uses a few.

    With `num_experts` 0 the model is dense, and every other field keeps its default.
    """

    num_experts: int = 0
    """Routed experts E per layer; 0 is a dense model."""
    top_k: int = 2
    """Experts k that each token uses, at most num_experts."""
    ffn_dim: int | None = None
    """Inner width F of one expert; None means model.ffn_dim. Set it only where dense layers,
    which have model.ffn_dim, stand beside those with experts."""
    shared_ffn_dim: int = 0
    """Inner width of the shared expert, which every token uses (n shared experts of width f are
    one of width n * f); 0 is none."""
    shared_gate: bool = False
    """Scale the shared expert's output by sigmoid(x w), a scalar per token (Qwen2-MoE)."""
    first_dense: int = 0
    """Layers at the bottom that stay dense (DeepSeek)."""
    every: int = 1
    """Above those, the last of every n layers has experts and the others are dense; 1: all have."""
    router: RouterKind = "softmax"
    """softmax over all experts, then top-k (Switch, Mixtral, Qwen); softmax_after_topk over the
    chosen logits (GPT-OSS); sigmoid scores of each expert by itself (DeepSeek-V3); sinkhorn: in
    training, the top-k of a plan that gives every expert of a sequence the same load (Clark et al.
    2022, arXiv 2202.01169); expert_choice: each expert takes the ceil(T k / E) tokens of a sequence
    that score it highest, those behind a token included, so that nothing can be generated (Zhou et
    al. 2022, arXiv 2202.09368). Logits and scores are float32 whatever the precision."""
    sinkhorn_iterations: int = 16
    """sinkhorn: times that rows and columns of the plan are normalised, at least 1."""
    router_bias: bool = False
    """Add a learned bias per expert to the logits (GPT-OSS)."""
    renormalize: bool = True
    """Divide the weights of the chosen experts by their sum (softmax, sigmoid and sinkhorn)."""
    routed_scale: float = 1.0
    """Factor on the weights of the routed experts (DeepSeek), above 0."""
    num_groups: int = 1
    """Groups of consecutive experts that are chosen among first; a divisor of num_experts. A group
    scores its best expert (softmax, DeepSeek-V2) or the sum of its best two (sigmoid, V3)."""
    top_groups: int = 1
    """Best groups whose experts a token may use, at most num_groups."""
    score_bias: bool = False
    """sigmoid: add a bias per expert to the scores when choosing, not when weighting. It is moved
    by bias_update_rate only, never by a gradient (Wang et al. 2024, arXiv 2408.15664)."""
    bias_update_rate: float = 0.0
    """score_bias: after each optimizer step, each bias moves by this towards an even load over
    the whole batch; 0 keeps the biases."""
    router_noise: float = 0.0
    """Training: standard deviation of the normal noise added to the logits (Shazeer et al. 2017,
    arXiv 1701.06538; V-MoE takes 1 / num_experts)."""
    dispatcher: Dispatcher = "capacity"
    """capacity: fixed buffers per expert, all-to-all, batched products; what doesn't fit is
    dropped. dropless: sorted tokens, products by group; needs a grouped-product kernel to be fast.
    allgather: every device's experts look at every token: simple, slow, a reference."""
    capacity_factor: float = 1.25
    """capacity: an expert takes ceil(T * k / E * this) tokens of each sequence of T tokens."""
    drop_policy: Literal["probability", "position"] = "probability"
    """capacity: which tokens of a sequence an overfull expert keeps: those with the largest
    routing weight, or the first."""
    allow_expanded_products: bool = False
    """dropless, allgather: run on GPU although XLA computes each expert on every token there,
    num_experts (dropless) or num_experts / top_k (allgather) times the needed work."""
    balance_coefficient: float = 0.0
    """Weight of each layer's load-balancing loss, 1 at an even load (Fedus et al. 2021)."""
    balance_scope: BalanceScope = "microbatch"
    """Tokens over which loads are balanced: those of a microbatch on all devices; of each sequence
    (mean over sequences); or of the whole batch, which takes a second forward pass when there are
    several microbatches. Only microbatch depends on train.microbatches, by definition."""
    device_groups: int = 1
    """Groups of consecutive experts, meant to be those of one device, whose loads the device
    balance loss evens out whatever the mesh; a divisor of num_experts."""
    device_balance_coefficient: float = 0.0
    """Weight of the balance loss between device_groups (DeepSeek-V2, arXiv 2405.04434, eq. 26),
    over the tokens of balance_scope; 1 at even loads."""
    z_coefficient: float = 0.0
    """Weight of each layer's mean squared log-partition of the router logits (ST-MoE)."""

    def __post_init__(self) -> None:
        require(
            self.num_experts >= 0,
            "model.moe.num_experts",
            self.num_experts,
            "at least 0",
            "0 is dense",
        )
        if not self.num_experts:
            self._check_all_default()
            return
        self._check_router()
        self._check_groups()
        self._check_dispatch()
        self._check_sequence_routers()
        for name in (
            "shared_ffn_dim",
            "first_dense",
            "router_noise",
            "balance_coefficient",
            "device_balance_coefficient",
            "z_coefficient",
        ):
            value = getattr(self, name)
            require(value >= 0, f"model.moe.{name}", value, "at least 0", "0 turns it off")
        require(
            self.ffn_dim is None or self.ffn_dim > 0,
            "model.moe.ffn_dim",
            self.ffn_dim,
            "a positive integer",
            "None takes model.ffn_dim",
        )
        require(self.every >= 1, "model.moe.every", self.every, "at least 1", "1 is every layer")
        require(
            not self.shared_gate or self.shared_ffn_dim > 0,
            "model.moe.shared_gate",
            self.shared_gate,
            "False without a shared expert",
            "set model.moe.shared_ffn_dim",
        )
        self._check_balance()

    def _check_all_default(self) -> None:
        for config_field in dataclasses.fields(self):
            value = getattr(self, config_field.name)
            require(
                value == config_field.default,
                f"model.moe.{config_field.name}",
                value,
                f"{config_field.default!r} while model.moe.num_experts is 0, a dense model",
                f"set model.moe.num_experts, or this to {config_field.default!r}",
            )

    def _check_balance(self) -> None:
        balanced = self.balance_coefficient > 0 or self.device_balance_coefficient > 0
        require(
            balanced or self.balance_scope == "microbatch",
            "model.moe.balance_scope",
            self.balance_scope,
            "the default while model.moe.balance_coefficient is 0",
            "set the coefficient, such as 0.01",
        )
        groups = self.device_groups
        require(
            groups >= 1 and self.num_experts % groups == 0,
            "model.moe.device_groups",
            groups,
            f"a divisor of model.moe.num_experts ({self.num_experts})",
            "take the number of devices that share the experts",
        )
        require(
            (groups > 1) == (self.device_balance_coefficient > 0),
            "model.moe.device_groups",
            groups,
            "more than 1 exactly when model.moe.device_balance_coefficient is set",
            "set both or neither",
        )

    def _check_router(self) -> None:
        require(
            1 <= self.top_k <= self.num_experts,
            "model.moe.top_k",
            self.top_k,
            f"between 1 and model.moe.num_experts ({self.num_experts})",
            "change one of them",
        )
        require(
            self.routed_scale > 0,
            "model.moe.routed_scale",
            self.routed_scale,
            "above 0",
            "1 is off",
        )
        require(
            self.renormalize or self.router != "softmax_after_topk",
            "model.moe.renormalize",
            self.renormalize,
            "True with router softmax_after_topk, whose weights add up to 1 by themselves",
            "set it to True or use router softmax",
        )
        require(
            not self.score_bias or self.router == "sigmoid",
            "model.moe.score_bias",
            self.score_bias,
            f"False with router {self.router}",
            "use router sigmoid",
        )
        require(
            self.bias_update_rate >= 0,
            "model.moe.bias_update_rate",
            self.bias_update_rate,
            "at least 0",
            "try 0.001",
        )
        require(
            not self.bias_update_rate or self.score_bias,
            "model.moe.bias_update_rate",
            self.bias_update_rate,
            "0 without model.moe.score_bias",
            "set model.moe.score_bias",
        )

    def _check_sequence_routers(self) -> None:
        """sinkhorn and expert_choice even out loads by themselves, over a whole sequence."""
        if self.router != "sinkhorn":
            condition = f"model.moe.router is {self.router!r}"
            require_defaults(self, "model.moe", ["sinkhorn_iterations"], condition)
        if self.router not in SEQUENCE_ROUTERS:
            return
        iterations = self.sinkhorn_iterations
        require(
            iterations >= 1, "model.moe.sinkhorn_iterations", iterations, "at least 1", "try 16"
        )
        for name in ("balance_coefficient", "device_balance_coefficient"):
            require(
                getattr(self, name) == 0,
                f"model.moe.{name}",
                getattr(self, name),
                f"0 with router {self.router}, which evens out loads by itself",
                "set it to 0 or use router softmax",
            )
        require(
            self.num_groups == 1,
            "model.moe.num_groups",
            self.num_groups,
            f"1 with router {self.router}",
            "use router softmax or sigmoid",
        )
        if self.router == "sinkhorn":
            require(
                self.top_k > 1 or not self.renormalize,
                "model.moe.renormalize",
                True,
                "False with router sinkhorn and top_k 1: divided by itself the weight of the one "
                "expert would be 1, and the router without gradient",
                "set model.moe.renormalize to False",
            )
            return
        require(
            not self.renormalize,
            "model.moe.renormalize",
            True,
            "False with router expert_choice, whose weights are the scores as they are",
            "set it so",
        )
        require(
            self.dispatcher != "dropless",
            "model.moe.dispatcher",
            self.dispatcher,
            "capacity, whose buffers the experts of router expert_choice just fill, or allgather",
            "set it to capacity",
        )
        require_defaults(
            self,
            "model.moe",
            ["capacity_factor", "drop_policy"],
            "model.moe.router is 'expert_choice'",
        )

    def _check_groups(self) -> None:
        groups = self.num_groups
        require(
            groups >= 1 and self.num_experts % groups == 0,
            "model.moe.num_groups",
            groups,
            f"a divisor of model.moe.num_experts ({self.num_experts})",
            "1 is no groups",
        )
        require(
            groups == 1 or self.router != "softmax_after_topk",
            "model.moe.num_groups",
            groups,
            "1 with router softmax_after_topk",
            "use router softmax or sigmoid",
        )
        require(
            1 <= self.top_groups <= groups,
            "model.moe.top_groups",
            self.top_groups,
            f"between 1 and model.moe.num_groups ({groups})",
            "change one of them",
        )
        per_group = self.num_experts // groups
        require(
            self.top_groups * per_group >= self.top_k,
            "model.moe.top_groups",
            self.top_groups,
            f"groups of at least model.moe.top_k ({self.top_k}) experts, {per_group} in each",
            "raise it or lower model.moe.top_k",
        )
        require(
            groups == 1 or self.router != "sigmoid" or per_group >= 2,
            "model.moe.num_groups",
            groups,
            "at least two experts in each group, whose best two make its score",
            "lower it",
        )

    def _check_dispatch(self) -> None:
        capacity = self.dispatcher == "capacity"
        factor = self.capacity_factor
        require(factor > 0, "model.moe.capacity_factor", factor, "above 0", "try 1.25")
        for name in ("capacity_factor", "drop_policy"):
            default = type(self).__dataclass_fields__[name].default
            require(
                capacity or getattr(self, name) == default,
                f"model.moe.{name}",
                getattr(self, name),
                f"the default with dispatcher {self.dispatcher}, which drops nothing",
                f"use dispatcher capacity, or set this to {default!r}",
            )
        require(
            not (capacity and self.allow_expanded_products),
            "model.moe.allow_expanded_products",
            True,
            "False with dispatcher capacity, which expands nothing",
            "set it to False",
        )

    @property
    def buffer_factor(self) -> float:
        """Rows that experts compute, by the token-expert pairs of an even load."""
        own = self.dispatcher == "capacity" and self.router != "expert_choice"
        return self.capacity_factor if own else 1.0

    def capacity(self, seq_len: int) -> int:
        """Tokens of one sequence that an expert takes at most (dispatcher capacity)."""
        # A token uses an expert once: more room than tokens is never filled. The subtraction
        # keeps float rounding from adding a slot where the product is a whole number.
        wanted = seq_len * self.top_k / self.num_experts * self.buffer_factor
        return min(math.ceil(wanted - 1e-9), seq_len)

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of this layer, counted from 0, is made of experts."""
        above = layer - self.first_dense
        return self.num_experts > 0 and above >= 0 and (above + 1) % self.every == 0
