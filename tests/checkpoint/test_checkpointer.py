"""Saving and restoring: bits, meshes, what is kept, and what is refused."""

import logging
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from mtjax.checkpoint.manager import CheckpointCorrupt, Checkpointer
from mtjax.checkpoint.manifest import CheckpointMismatch, build_manifest
from mtjax.config.checkpoint import CheckpointConfig

CHILD = pathlib.Path(__file__).parent / "children" / "killed_in_save.py"
MANIFEST = build_manifest({"model": {"embed_dim": 64}, "train": {"steps": 10}}, {"fsdp": 4})


def checkpointer(directory, manifest=MANIFEST, **fields) -> Checkpointer:
    return Checkpointer(directory, CheckpointConfig(**fields), manifest)


@pytest.fixture
def saved(tmp_path, toy):
    """A folder with checkpoints of steps 5 and 10 made on eight devices."""
    state = toy.state(toy.mesh(4, 2))
    with checkpointer(tmp_path) as writer:
        for step in (5, 10):
            writer.save(step, state, {"position": step})
    return tmp_path


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (2, 2), (1, 2), (1, 1)])
def test_eight_devices_restore_on_any_mesh_bit_for_bit(saved, toy, shape):
    expected = toy.state(toy.mesh(4, 2))
    abstract = toy.abstract(toy.mesh(*shape))
    state, data_state = checkpointer(saved).restore(abstract)
    toy.assert_equal(state, expected)
    assert data_state == {"position": 10}
    kernel = state["params"]["dense"]["kernel"]
    assert kernel.sharding == abstract["params"]["dense"]["kernel"].sharding
    assert len(kernel.addressable_shards) == shape[0] * shape[1]


def test_donating_the_state_right_after_save_keeps_the_saved_bits(tmp_path, toy):
    state = toy.state(toy.mesh(4, 2))
    expected = jax.tree.map(lambda leaf: leaf.copy(), state)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    with checkpointer(tmp_path) as writer:
        writer.save(1, state, {})
        spoil({"params": state["params"], "opt": state["opt"]})
        # On CPU, jax copies in place of donating while a thread still holds a view of the buffer,
        # so nothing is asserted about the buffers themselves.
        writer.wait()
        restored, _ = writer.restore(toy.abstract(toy.mesh(4, 2)))
    toy.assert_equal(restored, expected)


def test_restored_key_draws_the_same_numbers(saved, toy):
    mesh = toy.mesh(2, 1)
    state, _ = checkpointer(saved).restore(toy.abstract(mesh))
    expected = jax.random.uniform(toy.state(mesh)["key"], (4,))
    assert np.array_equal(jax.random.uniform(state["key"], (4,)), expected)


def test_params_alone_are_read_without_the_optimizer_state(saved, toy):
    mesh = toy.mesh(2, 1)
    expected = toy.state(mesh)["params"]
    got = checkpointer(saved).restore_params(toy.abstract(mesh)["params"], step=5)
    toy.assert_equal(got, expected)


def test_params_alone_need_only_the_model_config_to_match(saved, toy):
    other = build_manifest({"model": {"embed_dim": 64}, "optimizer": {"name": "lion"}}, {})
    abstract = toy.abstract(toy.mesh(1, 1))["params"]
    checkpointer(saved, other).restore_params(abstract)
    wrong = build_manifest({"model": {"embed_dim": 65}}, {})
    with pytest.raises(CheckpointMismatch, match=r"model\.embed_dim: 64 -> 65"):
        checkpointer(saved, wrong).restore_params(abstract)


def test_only_the_newest_and_the_multiples_are_kept(tmp_path, toy):
    state = {"x": toy.state(toy.mesh(1, 1))["step"]}
    with checkpointer(tmp_path, keep=2, every_steps=10, keep_every_steps=20) as writer:
        for step in range(10, 70, 10):
            writer.save(step, state, {})
    assert writer.steps() == [20, 40, 50, 60]


def test_saving_again_from_an_earlier_step_moves_later_checkpoints_aside(saved, toy):
    state = toy.state(toy.mesh(1, 1))
    with checkpointer(saved, restore_step=5) as writer:
        assert writer.step_to_resume() == 5
        writer.save(7, state, {})
    assert writer.steps() == [5, 7]
    assert [path.name[:13] for path in (saved / "superseded").iterdir()] == ["step_00000010"]


def test_reading_a_run_leaves_its_unfinished_save_alone(saved, toy):
    unfinished = saved / "step_00000015.orbax-checkpoint-tmp"
    unfinished.mkdir()
    checkpointer(saved).restore(toy.abstract(toy.mesh(1, 1)))
    assert unfinished.exists()


def test_foreign_and_half_written_entries_are_ignored_with_one_line(saved, caplog):
    (saved / "notes.txt").write_text("mine")
    (saved / "step_00000015").mkdir()
    (saved / "step_00000020.orbax-checkpoint-tmp").mkdir()
    (saved / "10").mkdir()
    with caplog.at_level(logging.WARNING, logger="mtjax"):
        reader = checkpointer(saved)
    assert reader.latest_step() == 10
    assert len(caplog.records) == 1
    for part in ("notes.txt (not a", "step_00000015 (incomplete", "tmp (unfinished", "10 (not a"):
        assert part in caplog.text


# tensorstore finishes its other reads after the first error, into a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["manifest.ocdbt", "arrays", "data_state", "truncated"])
def test_a_damaged_newest_checkpoint_names_itself_and_the_one_before(saved, toy, damage):
    newest = saved / "step_00000010"
    if damage == "arrays":
        for folder in newest.glob("state/**/d"):
            shutil.rmtree(folder)
    elif damage == "truncated":
        for file in newest.glob("state/**/d/*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "data_state":
        (newest / "data_state" / "metadata").write_text('{"posi')
    else:
        (newest / "state" / "manifest.ocdbt").write_bytes(b"xx")
    abstract = toy.abstract(toy.mesh(1, 1))
    with pytest.raises(CheckpointCorrupt, match=r"step_00000010 is damaged.*restore_step 5$"):
        checkpointer(saved).restore(abstract)
    state, _ = checkpointer(saved, restore_step=5).restore(abstract)
    toy.assert_equal(state, toy.state(toy.mesh(1, 1)))


def test_a_changed_shape_names_the_parameter_and_both_shapes(saved, toy):
    expected = r"params/dense/kernel: shape \(64, 32\) -> \(48, 32\)"
    with pytest.raises(CheckpointMismatch, match=expected):
        checkpointer(saved).restore(toy.abstract(toy.mesh(1, 1), width=48))


def test_added_and_missing_leaves_are_both_named(saved, toy):
    abstract = toy.abstract(toy.mesh(1, 1))
    abstract["extra"] = abstract.pop("step")
    with pytest.raises(CheckpointMismatch) as error:
        checkpointer(saved).restore(abstract)
    assert "extra: not in the checkpoint" in str(error.value)
    assert "step: only in the checkpoint" in str(error.value)


def test_a_mesh_that_does_not_divide_names_the_parameter(saved, toy):
    abstract = toy.abstract(toy.mesh(8, 1))
    bias = abstract["params"]["scale_bf16"]
    spec = jax.sharding.NamedSharding(bias.sharding.mesh, jax.sharding.PartitionSpec("fsdp"))
    abstract["params"]["scale_bf16"] = jax.ShapeDtypeStruct((3,), bias.dtype, sharding=spec)
    with pytest.raises(ValueError, match="params/scale_bf16 can't be restored to this mesh"):
        checkpointer(saved).restore(abstract)


def test_resume_must_and_a_wrong_restore_step_say_what_is_there(saved, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="no usable checkpoint"):
        checkpointer(empty, resume="must").step_to_resume()
    with pytest.raises(ValueError, match="these usable steps: 5, 10"):
        checkpointer(saved, restore_step=6).step_to_resume()
    assert checkpointer(saved, resume="never").step_to_resume() is None
    with pytest.raises(FileNotFoundError, match="no usable checkpoint"):
        checkpointer(empty).restore({})


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't be read"):
        checkpointer(tmp_path / "file")


@pytest.mark.parametrize("moment", ["arrays", "commit"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_previous_one_usable(tmp_path, toy, moment):
    child = subprocess.run([sys.executable, CHILD, tmp_path, moment], timeout=60)
    assert child.returncode == -signal.SIGKILL
    unfinished = [path.name for path in tmp_path.iterdir() if path.name != "step_00000001"]
    assert len(unfinished) == 1 and unfinished[0].startswith("step_00000002")
    arrays_written = any(tmp_path.glob("step_00000002*/state*/**/d/*"))
    assert arrays_written == (moment == "commit")
    reader = checkpointer(tmp_path)
    assert reader.steps() == [1]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"x": jax.ShapeDtypeStruct((1000,), np.float32, sharding=sharding)}
    state, data_state = reader.restore(abstract)
    assert np.array_equal(state["x"], np.full(1000, 1, np.float32))
    assert data_state == {"position": 1}
    with checkpointer(tmp_path) as writer:
        writer.save(2, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
