"""A run that was stopped and resumed is the run that never was stopped, bit for bit."""

import json
import math

import jax
import numpy as np
import pytest

from mtjax.checkpoint.manager import CheckpointCorrupt
from mtjax.checkpoint.manifest import CheckpointMismatch
from mtjax.config.mesh import MeshConfig
from mtjax.sharding import make_mesh
from mtjax.training import loop
from mtjax.training.loop import Trainer
from mtjax.training.state import make_setup
from tests.training.runs import assert_same, on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")


@pytest.fixture(autouse=True)
def as_many_devices_as_the_mesh(monkeypatch):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)


@pytest.fixture
def short_text(tmp_path):
    """A text of which 8 sequences of 16 bytes fit two and a half times into the training part."""
    path = tmp_path / "short.txt"
    paragraphs = [f"Paragraph {i:02d} says it.\n\n" for i in range(16)]
    path.write_text("".join(paragraphs), encoding="utf-8")
    return str(path)


@pytest.fixture
def documents(tmp_path):
    """Short documents, several of which share a packed sequence."""
    path = tmp_path / "documents.jsonl"
    lines = (json.dumps({"text": f"{i} " + "ab" * (i % 7)}) for i in range(60))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def straight_and_resumed(tmp_path, stops=(2, 4), steps=7, **changes):
    """The same run straight to the end, and stopped at each of `stops` and resumed."""
    straight = run(tiny(tmp_path / "straight", train__steps=steps, **changes))
    for stop in (*stops, steps):
        resumed = run(tiny(tmp_path / "resumed", train__steps=stop, **changes))
    # An evaluation at the end of each leg is the one thing that the straight run lacks.
    resumed.metrics = [r for r in resumed.metrics if "train/loss" in r or r["step"] == steps]
    return straight, resumed


def test_two_resumes_with_dropout_change_no_bit(tmp_path):
    straight, resumed = straight_and_resumed(tmp_path)
    assert straight.step == 7
    assert len(straight.metrics) == 8  # one per step and the evaluation
    assert_same(resumed, straight)


@pytest.mark.slow
def test_routers_and_their_biases_resume_bit_for_bit(tmp_path):
    moe = {
        "num_experts": 4,
        "router": "sigmoid",
        "score_bias": True,
        "bias_update_rate": 0.01,
        "balance_coefficient": 0.01,
        "balance_scope": "global",
        "capacity_factor": 0.8,
    }
    changes = {f"model__moe__{name}": value for name, value in moe.items()}
    straight, resumed = straight_and_resumed(tmp_path, (3,), steps=5, **changes)
    assert_same(resumed, straight)
    biases = [array for name, array in straight.arrays.items() if name.endswith("router.bias")]
    # The moments of the optimizer hold one too, which no gradient ever moves.
    assert max(np.abs(array).max() for array in biases) == pytest.approx(0.03, abs=0.021)


def test_dropout_masks_come_from_the_step_and_not_from_the_resume(tmp_path):
    """Without this the test above would hold for a step that ignores dropout."""
    with_dropout = run(tiny(tmp_path / "a", train__steps=2))
    without = run(tiny(tmp_path / "b", train__steps=2, model__dropout=0.0))
    assert with_dropout.metrics[0]["train/loss"] != without.metrics[0]["train/loss"]


@pytest.mark.parametrize("stops", [(2,), (3,)], ids=["before-the-boundary", "behind-it"])
def test_resumes_around_an_epoch_boundary_change_no_bit(tmp_path, short_text, stops):
    straight, resumed = straight_and_resumed(
        tmp_path, stops, data__paths=(short_text,), data__split="80,20", train__eval_batches=1
    )
    assert_same(resumed, straight)


@pytest.mark.slow
def test_a_resume_in_the_middle_of_packing_changes_no_bit(tmp_path, documents):
    straight, resumed = straight_and_resumed(
        tmp_path,
        data__source="jsonl",
        data__paths=(documents,),
        data__packing="first_fit",
        data__packing_bins=4,
        data__separate_documents=True,
        data__split="80,20",
        train__seq_len=16,
    )
    assert_same(resumed, straight)


@pytest.mark.slow
def test_a_resume_with_a_ramp_fp16_and_the_spike_guard_changes_no_bit(tmp_path):
    straight, resumed = straight_and_resumed(
        tmp_path,
        precision="fp16",
        train__microbatches=4,
        train__batch_ramp__start=2,
        train__batch_ramp__increment=2,
        train__batch_ramp__steps=5,
        run__faults__spike_ratio=1.5,
        run__faults__spike_window=2,
        run__faults__on_bad_step="skip",
    )
    assert_same(resumed, straight)
    assert straight.data_state["guard"]["recent"]["train/loss"]


def test_a_resume_changes_no_bit_of_an_optimizer_with_two_parts(tmp_path):
    straight, resumed = straight_and_resumed(tmp_path, stops=(1,), steps=3, optimizer__name="muon")
    assert_same(resumed, straight)


@pytest.mark.slow
def test_a_run_of_eight_devices_goes_on_with_two_and_then_with_one(tmp_path):
    straight = run(tiny(tmp_path / "straight", train__steps=6))
    saved = run(tiny(tmp_path / "moved", train__steps=2, mesh__fsdp=4, mesh__tensor=2))
    for sizes in ({"data": 2}, {"tensor": 2, "data": 2}, {"fsdp": 8}, {}):
        assert_restores_on(MeshConfig(**sizes), tiny(tmp_path / "moved", train__steps=4), saved)
    run(tiny(tmp_path / "moved", train__steps=4, mesh__data=2))
    moved = run(tiny(tmp_path / "moved", train__steps=6))
    ours, theirs = (
        [r["train/loss"] for r in f.metrics if "train/loss" in r] for f in (moved, straight)
    )
    assert len(ours) == 6
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def assert_restores_on(mesh_config, config, saved):
    """Parameters and moments come back on this mesh, split over all of it, bit for bit."""
    num_devices = math.prod(mesh_config.sizes.values())
    mesh = make_mesh(mesh_config, jax.devices()[:num_devices])
    setup = make_setup(config, mesh)
    state, _ = Trainer(config).checkpointer.restore(setup.abstract)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert np.asarray(leaf).tobytes() == saved.arrays[name].tobytes(), name
        assert len(leaf.sharding.device_set) == num_devices


def test_a_changed_config_names_each_field_and_leaves_the_run_as_it_was(tmp_path):
    run(tiny(tmp_path, train__steps=1))
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(CheckpointMismatch) as error:
        Trainer(tiny(tmp_path, train__steps=2, model__dropout=0.2, optimizer__beta1=0.8))
    assert "model.dropout: 0.1 -> 0.2" in str(error.value)
    assert "optimizer.beta1: 0.9 -> 0.8" in str(error.value)
    assert (tmp_path / "config.json").read_bytes() == before


def test_an_allowed_change_goes_on(tmp_path):
    run(tiny(tmp_path, train__steps=1))
    changes = {"model__dropout": 0.0, "checkpoint__allow_changes": ("model.dropout",)}
    assert run(tiny(tmp_path, train__steps=2, **changes)).step == 2


def test_fewer_steps_than_the_checkpoint_has_are_refused_with_both_numbers(tmp_path):
    run(tiny(tmp_path, train__steps=2))
    with pytest.raises(ValueError, match=r"train\.steps is 1, but the checkpoint .* step 2"):
        Trainer(tiny(tmp_path, train__steps=1))


def test_a_finished_run_says_so_and_touches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "initialize", lambda _: None)
    config = tiny(tmp_path, train__steps=2)
    assert loop.train(config) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(loop, "compile_step", None)
    capsys.readouterr()
    assert loop.train(config) == 0
    assert "is finished: all 2 steps are trained. For more, raise" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    del before[tmp_path / "run.lock"], after[tmp_path / "run.lock"]
    assert after == before


@pytest.mark.parametrize(
    ("changes", "left", "aside"),
    [
        ({"checkpoint__restore_step": 2}, [2, 3], ["4", "6"]),
        ({"checkpoint__resume": "never"}, [3], ["2", "4", "6"]),
    ],
)
def test_checkpoints_of_the_branch_that_was_left_are_moved_aside_at_the_first_save(
    tmp_path, changes, left, aside
):
    run(tiny(tmp_path, checkpoint__every_steps=2))
    run(tiny(tmp_path, train__steps=3, **changes))
    assert Trainer(tiny(tmp_path, train__steps=3)).checkpointer.steps() == left
    names = sorted(p.name[:13] for p in (tmp_path / "checkpoints" / "superseded").iterdir())
    assert names == [f"step_0000000{step}" for step in aside]


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("data_state", "{}", "data_state: no loader, guard"),
        ("data_state", '{"loader": {}, "guard": {}}', "data_state: KeyError"),
        ("data_state", "[]", "data_state: got a list"),
        ("manifest", "[]", "manifest: got a list"),
        ("manifest", "{}", "manifest: no config"),
    ],
)
def test_a_part_that_is_no_longer_what_was_saved_is_damage_before_compiling(
    tmp_path, file, text, reason
):
    run(tiny(tmp_path, train__steps=2, checkpoint__every_steps=1))
    (tmp_path / "checkpoints" / "step_00000002" / file / "metadata").write_text(text)
    with pytest.raises(CheckpointCorrupt, match="step_00000002 is damaged") as error:
        Trainer(tiny(tmp_path, train__steps=3))
    assert reason in str(error.value) and "--checkpoint.restore_step 1" in str(error.value)


def test_another_model_is_refused_without_advice_that_can_not_work(tmp_path):
    run(tiny(tmp_path, train__steps=1))
    with pytest.raises(CheckpointMismatch, match="arrays of other names or shapes") as error:
        Trainer(tiny(tmp_path, train__steps=2, model__num_layers=2))
    assert "model.num_layers: 1 -> 2" in str(error.value)
    assert "allow_changes" not in str(error.value)


def test_an_earlier_step_can_be_resumed_and_writes_the_same_again(tmp_path):
    first = run(tiny(tmp_path, train__steps=4, checkpoint__every_steps=2))
    again = run(tiny(tmp_path, train__steps=4, checkpoint__restore_step=2))
    assert_same(again, first)
    assert (tmp_path / "metrics.superseded.jsonl").exists()
