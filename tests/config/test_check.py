"""Config classes refuse what they do not declare and what nobody reads."""

import pytest

from mtjax.config import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    FaultConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    ScheduleConfig,
    TrainConfig,
)
from mtjax.config.data import PrepareConfig
from mtjax.config.sampling import SamplingConfig


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(norm="batchnorm"), r"model\.norm: .* one of rmsnorm, layernorm"),
        (lambda: ModelConfig(norm="rmsnrm"), "did you mean 'rmsnorm'"),
        (lambda: ModelConfig(position="rotary"), "one of rope, learned, none"),
        (lambda: RopeConfig(scaling="ntk", factor=2.0), "one of none, linear, llama3, yarn"),
        (lambda: DataConfig(packing="first-fit"), "did you mean 'first_fit'"),
        (lambda: TrainConfig(remat="ful"), "did you mean 'full'"),
        (lambda: ScheduleConfig(name="cosin"), "did you mean 'cosine'"),
        (lambda: OptimizerConfig(name="adam"), "did you mean 'adamw'"),
        (lambda: Config(precision="float32"), "precision: .* one of bf16, fp32, fp16"),
        (lambda: ModelConfig(tied_embeddings="no"), "expected True or False"),
        (lambda: AttentionConfig(backend="flash"), "one of auto, xla, cudnn"),
        (lambda: DataConfig(source="csv"), "one of text, jsonl, parquet, indexed"),
        (lambda: DataConfig(paths="ok.txt"), "a tuple, each entry a text"),
        (lambda: TrainConfig(steps=2.0), "expected a whole number"),
        (lambda: TrainConfig(steps="ten"), r"train\.steps: got 'ten'"),
        (lambda: TrainConfig(steps=True), "expected a whole number"),
        (lambda: MeshConfig(data="2"), r"mesh\.data"),
        (lambda: AttentionConfig(windows=8), r"model\.attention\.windows: .* a tuple"),
        (lambda: Config(model={"embed_dim": 8}), "expected a ModelConfig"),
        (lambda: TrainConfig(sample_prompt=["hi"]), "expected a text"),
        (lambda: OptimizerConfig(clip_norm="1"), "a finite number or None"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (ModelConfig, {"init_std": -1.0}),
        (ModelConfig, {"init_std": NAN}),
        (ModelConfig, {"norm_epsilon": -1.0}),
        (AttentionConfig, {"head_dim": 0}),
        (AttentionConfig, {"head_dim": -2}),
        (AttentionConfig, {"scale": NAN}),
        (OptimizerConfig, {"learning_rate": INF}),
        (OptimizerConfig, {"weight_decay": -1.0}),
        (OptimizerConfig, {"epsilon": -1.0}),
        (OptimizerConfig, {"name": "adafactor", "beta2_decay": -3.0}),
        (OptimizerConfig, {"clip_norm": INF}),
        (TrainConfig, {"z_loss": INF}),
        (TrainConfig, {"seed": 2**64}),
        (DataConfig, {"paths": ("a", "b"), "weights": (1.0, INF)}),
        (FaultConfig, {"watchdog_timeout_s": 1e-9}),
        (RopeConfig, {"scaling": "yarn", "factor": 4.0, "beta_fast": 0.5}),
        (RopeConfig, {"scaling": "yarn", "factor": 4.0, "original_max_positions": -1}),
        (RopeConfig, {"scaling": "linear", "factor": 1.0}),
        (
            DistributedConfig,
            {"mode": "explicit", "coordinator": "host:999999", "num_processes": 2},
        ),
    ],
)
def test_a_value_outside_its_range_is_refused(cls, fields):
    with pytest.raises(ValueError, match="expected"):
        cls(**fields)


PREPARED = {"paths": ("a",), "output": "b"}


@pytest.mark.parametrize(
    ("make", "unread"),
    [
        (lambda: ScheduleConfig(wsd_decay_ratio=0.5), "wsd_decay_ratio"),
        (lambda: ScheduleConfig(name="constant", final_ratio=0.5), "final_ratio"),
        (lambda: ScheduleConfig(name="inverse_sqrt", decay_steps=50), "decay_steps"),
        (lambda: ScheduleConfig(warmup_init_ratio=0.5), "warmup_init_ratio"),
        (lambda: RopeConfig(beta_fast=16.0), "beta_fast"),
        (lambda: RopeConfig(factor=2.0), "factor"),
        (lambda: SamplingConfig(temperature=0, top_k=5), "top_k"),
        (lambda: ModelConfig(position="none", rope=RopeConfig(theta=5.0)), r"model\.rope\.theta"),
        (lambda: RopeConfig(scaling="linear", factor=2.0, low_freq_factor=2.0), "low_freq_factor"),
        (lambda: DataConfig(packing_bins=8), "packing_bins"),
        (lambda: DataConfig(text_field="body"), "text_field"),
        (lambda: DataConfig(scan_tokens=False), "scan_tokens"),
        (lambda: DataConfig(eod_token="<end>"), "eod_token"),
        (
            lambda: PrepareConfig(paths=("a",), output="b", source="text", text_field="c"),
            "text_field",
        ),
        (lambda: FaultConfig(max_skipped=3), "max_skipped"),
        (lambda: FaultConfig(spike_window=8), "spike_window"),
        (lambda: MetricsConfig(wandb_project="mine"), "wandb_project"),
        (lambda: DistributedConfig(coordinator="host:1"), "coordinator"),
        (lambda: DistributedConfig(num_processes=2), "num_processes"),
        (lambda: DistributedConfig(mode="auto", process_id=1), "process_id"),
        (lambda: CheckpointConfig(every_steps=5, keep_every_steps=7), "keep_every_steps"),
    ],
)
def test_a_field_that_nobody_reads_is_refused(make, unread):
    with pytest.raises(ValueError, match=rf"{unread}: got "):
        make()


def test_windows_that_no_layer_has_are_refused():
    attention = AttentionConfig(windows=(8, 0, 4))
    ModelConfig(num_layers=3, attention=attention)
    with pytest.raises(ValueError, match=r"windows: got \(8, 0, 4\), expected at most .* \(2\)"):
        ModelConfig(num_layers=2, attention=attention)


def test_whole_numbers_pass_for_fractions_and_none_where_it_is_declared():
    assert OptimizerConfig(weight_decay=0, clip_norm=None).clip_norm is None
