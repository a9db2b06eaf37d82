"""The training loop: compile once, resume, step, report, evaluate, save, stop."""

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mtjax.checkpoint.manager import Checkpointer
from mtjax.checkpoint.manifest import build_manifest, check_steps
from mtjax.config import Config, resolve_backends, validate
from mtjax.data.batch import Batch
from mtjax.operation.distributed import BeatBoard, ending_together, initialize, is_main_process
from mtjax.operation.divergence import SpikeGuard, describe_batch
from mtjax.operation.faults import StopRequest, Watchdog
from mtjax.operation.folder import FolderLock, check_folder
from mtjax.operation.metrics import MetricWriter, check_writers
from mtjax.operation.plot import plot_loss
from mtjax.operation.progress import Progress, format_count
from mtjax.planning.flops import CONVENTION, count_params, flops_per_token
from mtjax.precision.te import check_installed
from mtjax.recipes import Provenance, describe, from_caller
from mtjax.sharding import make_mesh, platform_of
from mtjax.training.calibrate import calibrated
from mtjax.training.compiled import CompiledStep, compile_step
from mtjax.training.delayed import (
    described,
    fallen_layers,
    keep_layers,
    layers_to_fall_back,
    restorable,
    scaling_state,
)
from mtjax.training.evaluate import Evaluator, has_held_out
from mtjax.training.feed import Feed, samples_until
from mtjax.training.meter import Meter
from mtjax.training.resize import open_source, resized
from mtjax.training.sample import check_sample, draw_sample
from mtjax.training.state import TrainState, create_state, make_setup
from mtjax.training.step import Limits, Metrics
from mtjax.training.upcycle import check_source, upcycled

log = logging.getLogger(__name__)

MORE_DATA = "raise data.epochs or set it to None"


def prepare_mesh(config: Config) -> tuple[Config, Mesh]:
    """Build the mesh, and the config with its sizes and backends resolved.

    Raises:
        ValueError: the devices present don't fit the config.
    """
    resolved = config.mesh.resolve(jax.device_count())
    config = validate(dataclasses.replace(config, mesh=resolved))
    mesh = make_mesh(config.mesh)
    return resolve_backends(config, *platform_of(mesh)), mesh


def train(config: Config, provenance: Sequence[Provenance] | None = None) -> int:
    """Run the training that `config` describes; returns the process's exit code.

    `provenance` says where the values that are no defaults came from; None: from the caller.
    """
    check_folder(config.run.directory, "run.directory")
    check_writers(config.run.metrics)
    check_sample(config)
    check_installed(config)
    initialize(config.run.distributed)
    with ending_together(), FolderLock(config.run.directory, active=is_main_process()):
        Trainer(config, provenance).run()
    return 0


class Trainer:
    """One run: its parts, built in order, and the loop over steps."""

    def __init__(self, config: Config, provenance: Sequence[Provenance] | None = None) -> None:
        # Manifest and saved config hold what was asked for; the rest of the run what it became.
        asked = config
        self.config, self.mesh = prepare_mesh(config)
        self.directory = Path(config.run.directory)
        self.main = is_main_process()
        manifest = build_manifest(dataclasses.asdict(asked), self.config.mesh.sizes)
        self.checkpointer = Checkpointer(
            self.directory / "checkpoints", config.checkpoint, manifest
        )
        self.start_step = self.checkpointer.step_to_resume()
        self.resize_source = None
        if self.start_step is None and config.checkpoint.resize_from:
            self.resize_source = open_source(self.config, self.mesh)
        if self.start_step is None and config.checkpoint.upcycle_from:
            check_source(self.config, self.mesh)
        self.setup = make_setup(self.config, self.mesh)
        self.fallen: list[int] = []
        if self.start_step is not None:
            check_steps(config.train.steps, self.start_step)
            scaling = self.checkpointer.data_state(self.start_step).get("scaling")
            self.restored = restorable(self.config, self.setup.abstract, scaling)
            self.checkpointer.check_config(self.start_step, *self.restored)
            self.fallen = fallen_layers(self.config, scaling)
            self.config = keep_layers(self.config, self.fallen)
        samples = samples_until(config.train, config.train.steps)
        self.feed = Feed(self.config, self.mesh, "train", samples)
        self.guard = SpikeGuard(config.run.faults)
        self.finished = "" if self.start_step is None else self._take_up(self.start_step)
        if self.finished:
            return
        self.saved_step = self.start_step
        self.evaluator: Evaluator | None = None
        if has_held_out(config):
            self.evaluator = Evaluator(self.config, self.mesh, self.setup)
        self._save_config(from_caller(config) if provenance is None else provenance)
        self.step_flops = flops_per_token(config.model, config.train.seq_len)

    def _take_up(self, step: int) -> str:
        """Put data and guard where the checkpoint left them; says why nothing is left to do."""
        saved = self.checkpointer.data_state(step, ("loader", "guard"))
        try:
            self.feed.loader.set_state(saved["loader"])
            self.guard.load(saved["guard"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.checkpointer.corrupt(step, f"data_state: {error!r}") from error
        steps = self.config.train.steps
        if step == steps:
            return f"all {steps} steps are trained. For more, raise --train.steps"
        if self.feed.at_end():
            return f"the training data ended after step {step} of {steps}. For more, {MORE_DATA}"
        return ""

    def run(self) -> None:
        """Train to the last step, a stop signal, the end of the data, or an error."""
        if self.finished:
            if self.main:
                print(f"run folder {self.directory} is finished: {self.finished}", flush=True)
            return
        faults = self.config.run.faults
        self.watchdog = Watchdog(
            faults.watchdog_timeout_s,
            self.directory,
            startup_s=faults.watchdog_startup_s,
            process_index=jax.process_index(),
            board=BeatBoard() if jax.process_count() > 1 else None,
        )
        with self.watchdog:
            compiled = compile_step(self.config, self.mesh, self.setup)
            state = self._initial_state()
            self._say_hello(compiled)
            self._open_writers()
            # The signals come back last: a second SIGTERM must not cut the last save short.
            with StopRequest() as stop, self.checkpointer, self.writer, self.progress:
                state = self._loop(compiled, state, stop)
                self._finish(state, stop)

    def _open_writers(self) -> None:
        config, start = self.config, self.start_step or 0
        self.writer = MetricWriter(
            self.directory,
            config.run.metrics,
            resume_step=start,
            run_name=config.run.title,
            run_config=dataclasses.asdict(config),
            active=self.main,
        )
        self.progress = Progress(
            config.train.steps,
            start_step=start,
            mode=config.run.metrics.progress,
            active=self.main,
        )

    def _loop(self, compiled: CompiledStep, state: TrainState, stop: StopRequest) -> TrainState:
        step = self.start_step or 0
        train, checkpoint = self.config.train, self.config.checkpoint
        self.meter = Meter(self.config, self.mesh, self.step_flops, compiled.compile_s)
        self.fallback_due = False
        pending: Pending | None = None
        stopping = False
        while step < train.steps and not stopping:
            batch = self._next_batch(step)
            if batch is None:
                break
            if pending is not None and self.config.run.faults.spike_ratio:
                # The limits of this step need the step before.
                self._observe(pending)
                pending = None
            if self.fallback_due:
                compiled = self._fall_back(compiled, state)
            limits = Limits(*(np.float32(v) for v in self.guard.limits().values()))
            state, metrics = compiled.run(state, batch[0], limits)
            # The step before is read only now, so that the device is never idle.
            self._observe(pending)
            step += 1
            pending = Pending(step, metrics, batch[1])
            # After the last step there is nothing to resume: the run ends as it would have.
            stopping = stop.agreed() and step < train.steps
            due = checkpoint.due(step, train.steps)
            evaluate = train.eval_every and step % train.eval_every == 0 and step < train.steps
            if due or stopping or evaluate or step == train.steps:
                self._observe(pending)
                pending = None
            if evaluate:
                self._evaluate(step, state)
            if due or stopping:
                self._save(step, state)
        self._observe(pending)
        self.last_step, self.stopped = step, stopping
        return state

    def _next_batch(self, step: int) -> tuple[Any, Batch] | None:
        started = time.perf_counter()
        try:
            return self.feed.next()
        except StopIteration:
            self.progress.message(
                f"the training data is exhausted after step {step} of {self.config.train.steps}; "
                f"ending here. For more, {MORE_DATA}."
            )
            return None
        finally:
            self.meter.data_wait_s += time.perf_counter() - started

    def _observe(self, pending: "Pending | None") -> None:
        """Judge a step that was dispatched before, and report it if it is its turn."""
        if pending is None:
            return
        step, metrics, batch = pending
        values = {name: float(value) for name, value in metrics.items()}
        # Only now has the step ended, on every process: one may compile longer than another.
        self.watchdog.beat(step)
        self.fallback_due = values.get("quantize/saturated_layers", 0) > 0
        self.guard.observe(step, values, lambda: describe_batch(step - 1, batch.tokens))
        self.meter.count(self.config.train.batch_size_at(step - 1) * self.config.train.seq_len)
        if step % self.config.run.metrics.every_steps == 0 or step == self.config.train.steps:
            values |= self.meter.read()
            self.writer.write(step, values)
            self.progress.update(step, values)

    def _evaluate(self, step: int, state: TrainState) -> None:
        if self.evaluator is None:
            return
        started = time.perf_counter()
        with self.watchdog.phase("evaluation", self.config.run.faults.watchdog_startup_s):
            metrics = self.evaluator.run(state.params)
        self.writer.write(step, metrics)
        text = f"step {step} | held-out loss {metrics['eval/loss']:.4f} nats/token"
        if "eval/bits_per_byte" in metrics:
            text += f" | {metrics['eval/bits_per_byte']:.4f} bits per byte"
        self.progress.message(text)
        self.meter.pause(time.perf_counter() - started)

    def _save(self, step: int, state: TrainState) -> None:
        started = time.perf_counter()
        data_state = {"loader": self.feed.loader.get_state(), "guard": self.guard.state()}
        data_state["scaling"] = scaling_state(self.config, self.fallen)
        with self.watchdog.phase("checkpoint", float(self.config.checkpoint.timeout_s)):
            self.checkpointer.save(step, state, data_state)
        self.saved_step = step
        self.meter.pause(time.perf_counter() - started)

    def _initial_state(self) -> TrainState:
        fresh = self.start_step is None
        if fresh:
            state = create_state(self.config, self.mesh, self.setup)
            if self.config.checkpoint.upcycle_from:
                params = upcycled(self.config, self.mesh, self.setup, state.params)
                state = state._replace(params=params)
            if self.resize_source:
                parts = (self.config, self.mesh, self.setup, self.resize_source, self.feed)
                params, report = resized(*parts)
                state = state._replace(params=params)
                if self.main:
                    print(report, flush=True)
        else:
            abstract, ignore = self.restored
            state, _ = self.checkpointer.restore(abstract, self.start_step, ignore)
        if self.setup.abstract.delayed is not None and (fresh or state.delayed is None):
            state = calibrated(self.config, self.mesh, self.setup, state, self.feed)
            if self.main:
                why = "" if fresh else ": the checkpoint has none of this recipe"
                print(f"delayed scales start from the next batch{why}", flush=True)
        return state

    def _fall_back(self, compiled: CompiledStep, state: TrainState) -> CompiledStep:
        """The step with the layers that saturate too long in the compute dtype."""
        self.fallback_due = False
        assert state.delayed is not None
        layers = layers_to_fall_back(self.config, state.delayed)
        if not layers:
            return compiled
        self.config, self.fallen = keep_layers(self.config, layers), self.fallen + layers
        quantize = self.config.quantize
        self.progress.message(
            f"{described(self.config, layers)} (steps in a row with more than "
            f"{quantize.fallback_ratio:g} of the values of a product saturated: "
            f"{quantize.fallback_steps}); compiling again"
        )
        with self.watchdog.phase("compilation", self.config.run.faults.watchdog_startup_s):
            compiled = compile_step(self.config, self.mesh, self.setup)
        if self.evaluator is not None:
            self.evaluator = Evaluator(self.config, self.mesh, self.setup)
        self.meter.pause(compiled.compile_s)
        return compiled

    def _finish(self, state: TrainState, stop: StopRequest) -> None:
        """Last evaluation, sample and picture; a stopped run only waits for its checkpoint."""
        train, step = self.config.train, self.last_step
        if not self.stopped:
            if self.config.checkpoint.at_end and step != self.saved_step:
                self._save(step, state)  # the data ended before the last step
            self._evaluate(step, state)
            if train.sample_tokens:
                with self.watchdog.phase("sample", self.config.run.faults.watchdog_startup_s):
                    text = draw_sample(self.config, self.mesh, self.setup, state.params)
                    self.progress.message(f"sample: {text}")
            if self.main and self.config.run.metrics.plot:
                picture = plot_loss(self.directory, self.config.run.title)
                self.progress.message(f"loss curve: {picture}")
        with self.watchdog.phase("checkpoint", float(self.config.checkpoint.timeout_s)):
            self.checkpointer.wait()
        if self.stopped:
            self.progress.message(
                f"stopped by {stop.signal_name or 'another process'} after step {step}; saved. "
                "The same command resumes."
            )
        self.progress.message(f"run folder: {self.directory}")

    def _save_config(self, provenance: Sequence[Provenance]) -> None:
        """The final config and where each value came from: printed, and saved with the run."""
        if not self.main:
            return
        print(f"config (defaults left out):\n{describe(provenance)}", flush=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        record = {
            "config": dataclasses.asdict(self.config),
            "changed": [dataclasses.asdict(p) for p in provenance],
        }
        text = json.dumps(record, indent=2) + "\n"
        (self.directory / "config.json").write_text(text, encoding="utf-8")

    def _say_hello(self, compiled: CompiledStep) -> None:
        if not self.main:
            return
        device = self.mesh.devices.flat[0]
        axes = ", ".join(f"{a}={n}" for a, n in self.config.mesh.sizes.items() if n > 1)
        params = format_count(count_params(self.config.model))
        print(
            f"{params} parameters on {self.mesh.size} x {device.device_kind} "
            f"({axes or 'one device'}), attention by {self.config.model.attention.backend}, "
            f"{self.config.precision}\n"
            f"step compiled in {compiled.compile_s:.1f} s, {compiled.memory}\n"
            f"{self.step_flops / 1e6:.4g} MFLOP per token ({CONVENTION})",
            flush=True,
        )
        if self.start_step is not None:
            print(f"resumed from step {self.start_step}", flush=True)
        if self.fallen:
            print(described(self.config, self.fallen), flush=True)


class Pending(NamedTuple):
    """A step that was dispatched and not yet looked at."""

    step: int
    metrics: Metrics
    batch: Batch
