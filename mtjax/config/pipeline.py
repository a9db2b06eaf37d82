"""How the layers are dealt out over the pipeline axis, and in which order microbatches run."""

import itertools
from typing import Literal

from mtjax.config.check import config_class, require, require_defaults
from mtjax.config.model import ModelConfig
from mtjax.config.training import TrainConfig

PipelineSchedule = Literal["1f1b", "interleaved_1f1b", "gpipe"]
SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved_1f1b", "gpipe")


@config_class("pipeline")
class PipelineConfig:
    """Stages of the model along mesh.pipeline. No field changes a number the training computes."""

    schedule: PipelineSchedule = "1f1b"
    """1f1b: each microbatch goes backward as soon as it can (Narayanan et al. 2019), so that
    activations of a bounded number are held. interleaved_1f1b: a stage holds several chunks of
    layers, which shortens the bubble (Narayanan et al. 2021). gpipe: all go forward, then all go
    backward (Huang et al. 2019), the plain form to compare with."""
    chunks: int = 1
    """Chunks of consecutive layers per stage; more than 1 exactly with interleaved_1f1b."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage in the order of the model, chunk by chunk; () deals them out evenly."""

    def __post_init__(self) -> None:
        interleaved = self.schedule == "interleaved_1f1b"
        require(
            self.chunks > 1 if interleaved else self.chunks == 1,
            "pipeline.chunks",
            self.chunks,
            "2 or more with schedule interleaved_1f1b" if interleaved else
            f"1 with schedule {self.schedule}",
            "chunks and pipeline.schedule=interleaved_1f1b go together",
        )  # fmt: skip
        require(
            all(count > 0 for count in self.stage_layers),
            "pipeline.stage_layers",
            self.stage_layers,
            "at least one layer on each stage",
            "move a layer there or shrink mesh.pipeline",
        )


def layers_per_stage(
    model: ModelConfig, pipeline: PipelineConfig, num_stages: int
) -> tuple[int, ...]:
    """Layers of the chunks*num_stages parts of the model, in the order of the model.

    Part i is chunk i // num_stages of stage i % num_stages. A part holds whole repeats of the
    pattern of layers.
    """
    if pipeline.stage_layers:
        return pipeline.stage_layers
    repeats, parts = _repeats(model), num_stages * pipeline.chunks
    few, more = divmod(len(repeats), parts)
    begins = [few * i + min(i, more) for i in range(parts + 1)]
    return tuple(sum(repeats[a:b]) for a, b in itertools.pairwise(begins))


def _repeats(model: ModelConfig) -> list[int]:
    """Layers of each repeat of the pattern, in the order of the model; the last may be short."""
    return [
        min(period, stop - layer)
        for first, stop, period in model.layer_runs
        for layer in range(first, stop, period)
    ]


def check_pipeline(
    model: ModelConfig, train: TrainConfig, pipeline: PipelineConfig, num_stages: int
) -> None:
    """Check the pipeline against model and training, for a mesh.pipeline of `num_stages`.

    Raises:
        ValueError: the settings need a pipeline and there is none, or they don't fit.
    """
    if num_stages == 1:
        require_defaults(pipeline, "pipeline", None, "mesh.pipeline is 1")
        return
    interleaved = pipeline.schedule == "interleaved_1f1b"
    require(
        not interleaved or train.microbatches % num_stages == 0,
        "train.microbatches",
        train.microbatches,
        f"a multiple of mesh.pipeline ({num_stages}) with schedule interleaved_1f1b",
        "change it, or use schedule 1f1b with 1 chunk, which takes any number",
    )
    require(
        not train.remat_offload,
        "train.remat_offload",
        train.remat_offload,
        "() with a pipeline, which holds activations in buffers on the device",
        "keep the tensors with train.remat_save",
    )
    _check_layers(model, pipeline, num_stages)


def _check_layers(model: ModelConfig, pipeline: PipelineConfig, num_stages: int) -> None:
    parts, repeats = num_stages * pipeline.chunks, _repeats(model)
    period = max(period for _, _, period in model.layer_runs)
    pattern = f" of the pattern of layers ({period} layers)" if period > 1 else ""
    require(
        pipeline.stage_layers != () or len(repeats) >= parts,
        "model.num_layers",
        model.num_layers,
        f"at least {parts} {'repeats' + pattern if pattern else 'layers'}, one for each of "
        f"mesh.pipeline ({num_stages}) x pipeline.chunks ({pipeline.chunks})",
        "shrink mesh.pipeline or pipeline.chunks",
    )
    counts = layers_per_stage(model, pipeline, num_stages)
    require(
        len(counts) == parts,
        "pipeline.stage_layers",
        pipeline.stage_layers,
        f"{parts} numbers: mesh.pipeline ({num_stages}) x pipeline.chunks ({pipeline.chunks})",
        "give one for each part of the model",
    )
    require(
        sum(counts) == model.num_layers,
        "pipeline.stage_layers",
        pipeline.stage_layers,
        f"a sum of model.num_layers ({model.num_layers})",
        "place every layer exactly once",
    )
    require(
        set(itertools.accumulate(counts)) <= set(itertools.accumulate(repeats)),
        "pipeline.stage_layers",
        pipeline.stage_layers,
        f"whole repeats{pattern} on all stages but the last",
        "the stages run one program, so layers that differ must stand at the same places",
    )
