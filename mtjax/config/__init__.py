"""The configuration of a run: one frozen dataclass per concern, checked before any device."""

import dataclasses
import math
from dataclasses import field

from mtjax.config.check import config_class, require, require_defaults
from mtjax.config.checkpoint import CheckpointConfig
from mtjax.config.context import check_context
from mtjax.config.data import DataConfig
from mtjax.config.mesh import Layout, MeshConfig
from mtjax.config.mla import MlaConfig
from mtjax.config.model import AttentionConfig, ModelConfig, RopeConfig
from mtjax.config.moe import MoeConfig
from mtjax.config.mtp import MtpConfig
from mtjax.config.pipeline import PipelineConfig, PipelineSchedule, check_pipeline
from mtjax.config.precision import QUANTIZED, ComputeDtype, Precision, QuantizeConfig
from mtjax.config.precision import compute_dtype_name as _compute_dtype_name
from mtjax.config.products import resolve_products
from mtjax.config.run import DistributedConfig, FaultConfig, MetricsConfig, RunConfig
from mtjax.config.training import (
    BatchRampConfig,
    LossScaleConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from mtjax.config.transformer_engine import (
    check_transformer_engine,
    check_transformer_engine_on,
)

__all__ = [
    "AttentionConfig",
    "BatchRampConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "FaultConfig",
    "LossScaleConfig",
    "MeshConfig",
    "MetricsConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "MtpConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "QuantizeConfig",
    "RopeConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "on_layout",
    "resolve_backends",
    "validate",
]


@config_class("")
class Config:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The arrangement of devices."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Stages and schedule along mesh.pipeline."""
    data: DataConfig = field(default_factory=DataConfig)
    """What is trained on."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and shape of the training."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning-rate schedule."""
    precision: Precision = "bf16"
    """bf16, fp32, fp16: the compute dtype. fp8 (one scale per tensor), fp8_delayed (from earlier
    steps), fp8_rowwise, fp8_block, mxfp8, nvfp4, int8: the layers' matrix products on operands
    rounded to that, all else in bf16. Master weights, gradients and optimizer state are float32 in
    each."""
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    """Which products are quantised, read when precision is of less than 16 bits."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling, read when precision is fp16."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When states are saved."""
    run: RunConfig = field(default_factory=RunConfig)
    """Folder, reporting, faults and processes of this run."""

    @property
    def compute_dtype(self) -> ComputeDtype:
        """Dtype of activations, and of products that are not quantised."""
        return _compute_dtype_name(self.precision, self.quantize)

    @property
    def quantized(self) -> bool:
        """Whether the products of layers run on operands of less than 16 bits."""
        return self.precision in QUANTIZED

    @property
    def unquantized(self) -> "Config":
        """The same with all products in the compute dtype."""
        return dataclasses.replace(self, precision=self.compute_dtype, quantize=QuantizeConfig())


def on_layout(config: Config, layout: Layout) -> Config:
    """The same run on another mesh, without the settings of axes that it lacks."""
    train, pipeline, model = config.train, PipelineConfig(), config.model
    if layout.mesh.context == 1:
        model = model.with_exchange(AttentionConfig().exchange)
    elif layout.exchange is not None:
        model = model.with_exchange(layout.exchange)
    if layout.microbatches is not None:
        train = dataclasses.replace(train, microbatches=layout.microbatches)
    if layout.mesh.pipeline > 1:
        pipeline = config.pipeline
    if layout.chunks is not None:
        name: PipelineSchedule = "interleaved_1f1b" if layout.chunks > 1 else "1f1b"
        pipeline = dataclasses.replace(pipeline, schedule=name, chunks=layout.chunks)
    if layout.schedule is not None:
        pipeline = dataclasses.replace(pipeline, schedule=layout.schedule)
    return dataclasses.replace(
        config, model=model, mesh=layout.mesh, train=train, pipeline=pipeline
    )


def validate(config: Config) -> Config:
    """Check what concerns several parts; returns `config`. Touches no device.

    Raises:
        ValueError: saying what was got, what was expected, and how to fix it.
    """
    model, train = config.model, config.train
    require(
        model.max_positions is None or train.seq_len <= model.max_positions,
        "train.seq_len",
        train.seq_len,
        f"at most model.max_positions ({model.max_positions})",
        "shorten the sequence or enlarge the position table",
    )
    schedule = config.optimizer.schedule
    require(
        schedule.warmup_steps <= (schedule.decay_steps or train.steps),
        "optimizer.schedule.warmup_steps",
        schedule.warmup_steps,
        f"at most the steps of the schedule ({schedule.decay_steps or train.steps})",
        "shorten the warm-up",
    )
    if config.precision != "fp16":
        condition = f"precision is {config.precision!r}"
        require_defaults(config.loss_scale, "loss_scale", None, condition)
    require(
        model.attention.backend != "cudnn" or config.compute_dtype != "fp32",
        "model.attention.backend",
        "cudnn",
        "xla or auto while activations are fp32",
        "cuDNN attention computes in bf16 and fp16",
    )
    require(
        model.mtp.depth < train.seq_len,
        "model.mtp.depth",
        model.mtp.depth,
        f"less than train.seq_len ({train.seq_len}), or a module has nothing to predict",
        "lower it",
    )
    _check_saved_names(config)
    _check_quantization(config)
    _check_upcycling(config)
    _check_resizing(config)
    _check_mesh(config)
    return config


def _check_saved_names(config: Config) -> None:
    """Check that layers of this model have the tensors that rematerialisation is to keep."""
    model = config.model
    experts = (model.moe.num_experts > 0, "a model with experts")
    needs = {
        "latent": (model.attention.mla.kv_rank > 0, "latent attention"),
        "expert_in": experts,
        "expert_out": experts,
        "quantized": (config.quantized, f"a precision among {', '.join(QUANTIZED)}"),
    }
    for field_name in ("remat_save", "remat_offload"):
        for name in getattr(config.train, field_name):
            present, what = needs.get(name, (True, ""))
            require(
                present,
                f"train.{field_name}",
                name,
                f"names of tensors that this model has; this one takes {what}",
                "leave the name out",
            )


def _check_quantization(config: Config) -> None:
    quantize, moe = config.quantize, config.model.moe
    if not config.quantized:
        condition = f"precision is {config.precision!r}, which quantises nothing"
        require_defaults(quantize, "quantize", None, condition)
        return
    if config.precision != "fp8_delayed":
        names = ["amax_history", "fallback_ratio", "fallback_steps"]
        condition = "scales come from the values at hand; set precision to fp8_delayed"
        require_defaults(quantize, "quantize", names, condition)
    require(
        quantize.backend != "scaled_matmul" or config.precision == "mxfp8",
        "quantize.backend",
        quantize.backend,
        f"xla or auto with precision {config.precision}",
        "scaled_matmul is for mxfp8",
    )
    num_layers, layers = config.model.num_layers, quantize.bf16_layers
    first, behind = quantize.first_bf16_layers, num_layers - quantize.last_bf16_layers
    require(
        len(set(layers)) == len(layers) and all(first <= i < behind for i in layers),
        "quantize.bf16_layers",
        layers,
        f"indices of layers, each once, from {first} to {behind - 1}",
        "name layers of this model that quantize.first_bf16_layers and last_bf16_layers leave",
    )
    kept = len(quantize.kept_layers(num_layers))
    kept_name = "layers in bf16 of quantize.first_bf16_layers, last_bf16_layers and bf16_layers"
    require(
        kept < num_layers,
        kept_name,
        kept,
        f"fewer than model.num_layers ({num_layers})",
        "to quantise nothing, set precision to bf16",
    )
    require(
        kept == 0 or config.mesh.pipeline == 1,
        kept_name,
        kept,
        "0 with a pipeline, whose stages run the same program",
        "quantise all layers, or leave mesh.pipeline at 1",
    )
    require(
        quantize.fallback_ratio == 0 or config.mesh.pipeline == 1,
        "quantize.fallback_ratio",
        quantize.fallback_ratio,
        "0 with a pipeline, whose stages run the same program",
        "let no layer fall back, or leave mesh.pipeline at 1",
    )
    tiled = config.precision in ("fp8_block", "mxfp8", "nvfp4")
    require(
        not (moe.num_experts and tiled) or moe.dispatcher != "dropless",
        "model.moe.dispatcher",
        moe.dispatcher,
        f"capacity or allgather with precision {config.precision}, whose tiles of rows would hold "
        "those of several experts",
        "use one of them, or precision fp8",
    )
    if quantize.backend == "te":
        parts = config.model, config.train, config.mesh, config.precision, quantize
        check_transformer_engine(*parts)


def _check_upcycling(config: Config) -> None:
    """Check that copies of a dense feed-forward part make the model that is asked for."""
    source, model, moe = config.checkpoint.upcycle_from, config.model, config.model.moe
    if not source:
        return
    name = "checkpoint.upcycle_from"
    require(
        moe.num_experts > 0,
        name,
        source,
        "empty for a dense model",
        "set model.moe.num_experts, or start from a checkpoint of the same run by "
        "checkpoint.resume",
    )
    require(
        not model.mtp.depth,
        name,
        source,
        "empty with model.mtp, whose modules a dense checkpoint lacks",
        "set model.mtp.depth to 0 for this run",
    )
    require(
        model.expert_dim == model.ffn_dim and not moe.shared_ffn_dim,
        name,
        source,
        "experts as wide as the dense feed-forward part and no shared one, to be copies of it",
        "drop model.moe.ffn_dim and model.moe.shared_ffn_dim",
    )
    require(
        moe.renormalize and moe.routed_scale == 1,
        name,
        source,
        "weights of a token's experts that add up to 1, so that the model goes on as it was",
        "set model.moe.renormalize, and model.moe.routed_scale to 1",
    )


def _check_resizing(config: Config) -> None:
    """Check what can be known of a change of experts without their checkpoint."""
    source = config.checkpoint.resize_from
    require(
        not source or config.model.moe.num_experts > 0,
        "checkpoint.resize_from",
        source,
        "empty for a dense model",
        "set model.moe.num_experts",
    )
    require(
        not source or not config.model.mtp.depth,
        "checkpoint.resize_from",
        source,
        "empty with model.mtp, whose modules' experts are not resized",
        "set model.mtp.depth to 0 for this run",
    )


def _check_mesh(config: Config) -> None:
    """Check that every split dim divides, for the axes whose size is given."""
    model, train, mesh = config.model, config.train, config.mesh
    shards = "fsdp x mesh.context x mesh.expert"
    splits = [
        ("tensor", "model.attention.num_heads", model.attention.num_heads),
        ("tensor", "model.attention.num_kv_heads", model.num_kv_heads),
        ("tensor", "model.ffn_dim", model.ffn_dim),
        ("pipeline x mesh.tensor", "model.vocab_multiple", model.vocab_multiple),
        ("tensor", "train.seq_len", train.seq_len),
        (shards, "model.embed_dim", model.embed_dim),
    ]
    splits += [
        (shards, f"model.attention.mla.{name}", getattr(model.attention.mla, name))
        for name in ("kv_rank", "q_rank")
    ]
    if model.moe.num_experts:
        experts = model.moe.num_experts
        splits.append(("expert x mesh.context x mesh.tensor", "model.moe.num_experts", experts))
        splits.append(("tensor", "model.moe.shared_ffn_dim", model.moe.shared_ffn_dim))
    for axes, name, size in splits:
        parts = math.prod(max(mesh.sizes[axis], 1) for axis in axes.split(" x mesh."))
        require(
            size % parts == 0,
            name,
            size,
            f"a multiple of mesh.{axes} ({parts})",
            f"change it, or shrink mesh.{axes}",
        )
    check_context(model, train, mesh)
    if mesh.pipeline != -1:
        check_pipeline(model, train, config.pipeline, mesh.pipeline)
    require(
        mesh.expert == 1 or model.moe.num_experts > 0,
        "mesh.expert",
        mesh.expert,
        "1 for a dense model",
        "use mesh.fsdp, or set model.moe.num_experts",
    )
    replicas = max(mesh.data, 1) * max(mesh.fsdp, 1) * max(mesh.expert, 1)
    require(
        (train.batch_size // train.microbatches) % replicas == 0,
        "train.batch_size",
        train.batch_size,
        f"a multiple of train.microbatches ({train.microbatches}) x mesh.data x mesh.fsdp x "
        f"mesh.expert ({replicas})",
        "raise the batch size or lower the microbatches",
    )


def resolve_backends(
    config: Config, platform: str, compute_capability: tuple[int, int] | None = None
) -> Config:
    """Replace each "auto" by what the mesh's devices have.

    Args:
        platform: "cpu" or "gpu".
        compute_capability: of the GPUs, major and minor.

    Raises:
        ValueError: the platform lacks what the config asks for.
    """
    from mtjax.layers.attention_backends import AttentionCall, unsupported

    attention, train = config.model.attention, config.train
    on_gpu = platform in ("gpu", "cuda")
    require(
        on_gpu or attention.backend != "cudnn",
        "model.attention.backend",
        "cudnn",
        f"xla or auto on platform {platform!r}",
        "cuDNN runs on NVIDIA GPUs",
    )
    require(
        on_gpu or not train.remat_offload,
        "train.remat_offload",
        train.remat_offload,
        f"() on platform {platform!r}, which has no separate host memory",
        "drop it, or keep the tensors with train.remat_save",
    )
    _check_expert_products(config, on_gpu)
    call = AttentionCall(
        scale=1.0,
        value_dim=config.model.value_dim,
        softcap=attention.logit_softcap,
        dropout=attention.dropout,
        packed=config.data.separate_documents,
        exchange=attention.exchange if config.mesh.context != 1 else None,
    )
    config = resolve_products(config, on_gpu, compute_capability)
    if config.quantize.backend == "te":
        check_transformer_engine_on(platform)
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[config.compute_dtype]
    reason = unsupported("cudnn", call, config.model.head_dim, dtype)
    if attention.backend != "auto":
        require(
            attention.backend != "cudnn" or reason is None,
            "model.attention.backend",
            "cudnn",
            f"xla or auto, as cuDNN does not support {reason}",
            "change one of them",
        )
        return config
    cudnn = on_gpu and reason is None
    model = config.model.with_attention("cudnn" if cudnn else "xla")
    return dataclasses.replace(config, model=model)


def _check_expert_products(config: Config, on_gpu: bool) -> None:
    """Refuse dispatchers whose products XLA expands on GPU, unless that is asked for."""
    moe = config.model.moe
    expands = moe.num_experts > 0 and moe.dispatcher != "capacity"
    times = moe.num_experts
    if moe.dispatcher == "allgather":
        times = -(-moe.num_experts // moe.top_k)
    require(
        not (expands and on_gpu) or moe.allow_expanded_products,
        "model.moe.dispatcher",
        moe.dispatcher,
        f"capacity on GPU, where XLA expands the expert products to up to {times} times the FLOPs",
        "set model.moe.dispatcher to capacity, or accept the cost with "
        "model.moe.allow_expanded_products",
    )
