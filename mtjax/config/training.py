"""How the model is trained: steps and batches, optimizer, schedule, numerics."""

from dataclasses import field
from typing import Literal

from mtjax.config.check import config_class, require, require_defaults

OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"]

SAVEABLE_TENSORS = (
    "qkv",
    "latent",
    "attention_out",
    "ffn_in",
    "block_out",
    "expert_in",
    "expert_out",
    "quantized",
)
"""Names that a block gives to the tensors that remat=selective may keep."""


@config_class("optimizer.schedule")
class ScheduleConfig:
    """Learning-rate schedule; the peak is optimizer.learning_rate."""

    name: ScheduleName = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up to the peak."""
    warmup_init_ratio: float = 0.0
    """Learning rate at step 0 as a share of the peak."""
    decay_steps: int | None = None
    """Step at which the final rate is reached; None means train.steps."""
    final_ratio: float = 0.1
    """Final rate as a share of the peak (linear, cosine, wsd)."""
    wsd_decay_ratio: float = 0.1
    """wsd: share of decay_steps spent in the last, linear descent (Hu et al. 2024)."""

    def __post_init__(self) -> None:
        prefix = "optimizer.schedule"
        require(
            self.warmup_steps >= 0, f"{prefix}.warmup_steps", self.warmup_steps, ">= 0", "raise it"
        )
        for name in ("warmup_init_ratio", "final_ratio", "wsd_decay_ratio"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{prefix}.{name}", value, "a share in [0, 1]", "change it")
        read = SCHEDULE_FIELDS[self.name]
        others = sorted({n for names in SCHEDULE_FIELDS.values() for n in names} - set(read))
        require_defaults(self, prefix, others, f"{prefix}.name is {self.name!r}")
        if self.warmup_steps == 0:
            require_defaults(self, prefix, ["warmup_init_ratio"], "there is no warm-up")
        require(
            self.decay_steps is None or self.decay_steps > self.warmup_steps,
            f"{prefix}.decay_steps",
            self.decay_steps,
            f"more than warmup_steps ({self.warmup_steps})",
            "lengthen the decay or shorten the warm-up",
        )


SCHEDULE_FIELDS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("decay_steps", "final_ratio"),
    "cosine": ("decay_steps", "final_ratio"),
    "wsd": ("decay_steps", "final_ratio", "wsd_decay_ratio"),
    "inverse_sqrt": (),
}
"""Which of the specific fields each schedule reads; setting another is an error."""

OPTIMIZER_FIELDS: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "epsilon"),
    "adafactor": ("beta2_decay",),
    "lion": ("beta1", "beta2"),
    "muon": ("beta1", "beta2", "epsilon", "momentum"),
    "sgd": ("momentum",),
}
"""Which of the specific fields each optimizer reads; setting another is an error."""


@config_class("optimizer")
class OptimizerConfig:
    """Optimizer by optax, with decoupled weight decay on matrices."""

    name: OptimizerName = "adamw"
    """adamw, adafactor, lion, muon (matrices; adamw for the rest) or sgd."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment (adamw, lion, muon's adamw part)."""
    beta2: float = 0.95
    """Decay of the second moment (adamw, lion, muon's adamw part)."""
    epsilon: float = 1e-8
    """Added to the root of the second moment (adamw, muon)."""
    momentum: float = 0.95
    """Momentum (sgd, muon)."""
    beta2_decay: float = 0.8
    """adafactor: the second moment decays by 1 - step ** -this (Shazeer & Stern 2018)."""
    weight_decay: float = 0.1
    """Decoupled decay, times the learning rate; norms and biases are left out."""
    decay_embeddings: bool = True
    """Apply weight decay to the embedding, position and output tables too."""
    clip_norm: float | None = 1.0
    """Scale gradients so that their global norm is at most this; None turns it off."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """How the learning rate moves."""

    def __post_init__(self) -> None:
        read = OPTIMIZER_FIELDS[self.name]
        others = sorted({n for names in OPTIMIZER_FIELDS.values() for n in names} - set(read))
        condition = f"optimizer.name is {self.name!r}, which reads {', '.join(read)}"
        require_defaults(self, "optimizer", others, condition)
        require(
            self.learning_rate > 0,
            "optimizer.learning_rate",
            self.learning_rate,
            "a positive number",
            "try 3e-4",
        )
        require(
            self.clip_norm is None or self.clip_norm > 0,
            "optimizer.clip_norm",
            self.clip_norm,
            "a positive number",
            "None turns clipping off",
        )
        for name in ("weight_decay", "epsilon"):
            value = getattr(self, name)
            require(value >= 0, f"optimizer.{name}", value, "at least 0", "raise it")
        decay = self.beta2_decay
        require(0 < decay <= 1, "optimizer.beta2_decay", decay, "in (0, 1]", "try 0.8")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name}", value, "in [0, 1)", "try 0.9")


@config_class("loss_scale")
class LossScaleConfig:
    """Dynamic loss scaling, used by precision fp16 (Micikevicius et al. 2018)."""

    initial: float = 2.0**15
    """Factor on the loss at step 0."""
    growth_interval: int = 1000
    """Good steps in a row after which the factor doubles; it halves on an overflow."""
    minimum: float = 1.0
    """The factor never falls below this."""

    def __post_init__(self) -> None:
        require(
            self.initial >= self.minimum > 0,
            "loss_scale.initial",
            self.initial,
            f"at least loss_scale.minimum ({self.minimum}), which is positive",
            "raise it",
        )
        require(
            self.growth_interval > 0,
            "loss_scale.growth_interval",
            self.growth_interval,
            "a positive number of steps",
            "try 1000",
        )


@config_class("train.batch_ramp")
class BatchRampConfig:
    """Batch-size ramp: start small, grow by equal increments until train.batch_size."""

    start: int = 0
    """Sequences per step at step 0; 0 turns the ramp off."""
    increment: int = 0
    """Sequences added at each increase."""
    steps: int = 0
    """Steps until the full batch size is reached."""

    def __post_init__(self) -> None:
        for name in ("start", "increment", "steps"):
            value = getattr(self, name)
            require(
                value > 0 if self.start else value == 0,
                f"train.batch_ramp.{name}",
                value,
                "a positive integer" if self.start else "0 while batch_ramp.start is 0",
                "set start, increment and steps together",
            )


@config_class("train")
class TrainConfig:
    """Length and shape of the training."""

    steps: int = 1000
    """Optimizer steps in total, those before a resume included."""
    batch_size: int = 16
    """Sequences per optimizer step, over all devices and microbatches."""
    seq_len: int = 256
    """Tokens T that the model sees per sequence."""
    microbatches: int = 1
    """Parts M into which a batch is cut; gradients accumulate in float32."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Grow the batch over the first steps."""
    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition term that keeps logits small (PaLM, section 5)."""
    loss_chunk: int = 1024
    """Tokens of a sequence whose logits exist at once in float32."""
    remat: Literal["none", "selective", "full"] = "none"
    """What backward recomputes: nothing, all but remat_save, or each block from its input."""
    remat_save: tuple[str, ...] = ("qkv", "attention_out", "ffn_in")
    """remat=selective: names of the tensors that are kept."""
    remat_offload: tuple[str, ...] = ()
    """remat=selective: names of the tensors that are moved to host memory instead (GPU)."""
    unroll_layers: bool = False
    """Write the layers out instead of scanning: faster on CPU, slow to compile when deep."""
    eval_every: int = 0
    """Steps between evaluations on the held-out split; 0 evaluates only at the end."""
    eval_batches: int = 16
    """Batches per evaluation at most; fewer where the split ends before."""
    sample_tokens: int = 0
    """Tokens of text generated at the end of the run as a sample; 0 is none."""
    sample_prompt: str = ""
    """Text that the sample continues; required by sample_tokens."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "microbatches", "loss_chunk"):
            value = getattr(self, name)
            require(value > 0, f"train.{name}", value, "a positive integer", "raise it")
        require(0 <= self.seed < 2**32, "train.seed", self.seed, "in [0, 2**32)", "take another")
        for name in ("eval_every", "eval_batches", "sample_tokens", "z_loss"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}", value, "at least 0", "raise it")
        require(
            self.batch_size % self.microbatches == 0,
            "train.batch_size",
            self.batch_size,
            f"a multiple of train.microbatches ({self.microbatches})",
            "change one of them",
        )
        self._check_remat()
        self._check_ramp()
        require(
            (self.sample_tokens > 0) == bool(self.sample_prompt),
            "train.sample_prompt",
            self.sample_prompt,
            "a text exactly when train.sample_tokens is set",
            "set both, or neither: 0 and an empty text",
        )

    def _check_remat(self) -> None:
        default = TrainConfig.__dataclass_fields__["remat_save"].default
        require(
            self.remat == "selective" or (self.remat_save == default and not self.remat_offload),
            "train.remat_offload" if self.remat_offload else "train.remat_save",
            self.remat_offload or self.remat_save,
            f"the default while train.remat is {self.remat!r}",
            "set train.remat to selective",
        )
        for name in (*self.remat_save, *self.remat_offload):
            require(
                name in SAVEABLE_TENSORS,
                "train.remat_save",
                name,
                f"names among {', '.join(SAVEABLE_TENSORS)}",
                "correct the name",
            )
        both = set(self.remat_save) & set(self.remat_offload)
        require(
            not both,
            "train.remat_offload",
            sorted(both),
            "names not in train.remat_save",
            "keep a tensor on the device or offload it, not both",
        )

    def _check_ramp(self) -> None:
        ramp = self.batch_ramp
        if not ramp.start:
            return
        micro = self.batch_size // self.microbatches
        require(
            ramp.start % micro == 0 and ramp.increment % micro == 0,
            "train.batch_ramp",
            (ramp.start, ramp.increment),
            f"start and increment in multiples of the microbatch ({micro} sequences)",
            "raise train.microbatches or change the ramp",
        )
        require(
            ramp.start <= self.batch_size and (self.batch_size - ramp.start) % ramp.increment == 0,
            "train.batch_ramp",
            (ramp.start, ramp.increment),
            f"increments that lead from start to train.batch_size ({self.batch_size})",
            "change the increment",
        )

    def batch_size_at(self, step: int) -> int:
        """Sequences in the batch of `step` (counted from 0)."""
        ramp = self.batch_ramp
        if not ramp.start or step >= ramp.steps:
            return self.batch_size
        increases = (self.batch_size - ramp.start) // ramp.increment
        return ramp.start + ramp.increment * (step * (increases + 1) // ramp.steps)
