"""A checkpoint whose bytes are no longer those that were saved is refused."""

import logging
import shutil

import pytest

from mtjax.checkpoint import sums
from mtjax.checkpoint.manager import CheckpointCorrupt
from tests.checkpoint.test_checkpointer import checkpointer

SUMS = "manifest/sums.json"


@pytest.fixture
def saved(tmp_path, toy):
    """A folder with checkpoints of steps 5 and 10 made on eight devices."""
    state = toy.state(toy.mesh(4, 2))
    with checkpointer(tmp_path) as writer:
        for step in (5, 10):
            writer.save(step, state, {"position": step})
    return tmp_path


def flip_the_middle(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_names_the_file_and_the_usable_checkpoint(saved, toy):
    newest = saved / "step_00000010"
    abstract = toy.abstract(toy.mesh(2, 1))
    recorded = sums.read_sums(newest / SUMS)
    files = [
        p for folder in ("state", "data_state", "manifest") for p in (newest / folder).rglob("*")
    ]
    names = {p.relative_to(newest).as_posix() for p in files if p.is_file()}
    names.remove("manifest/commit_success.txt")  # of which only the presence counts
    assert set(recorded) == names - {SUMS}
    assert any(name.startswith("state/ocdbt.process_0/d/") for name in names)
    for name in sorted(names):
        before = (newest / name).read_bytes()
        flip_the_middle(newest / name)
        with pytest.raises(CheckpointCorrupt, match=r"step_00000010 is damaged.*restore_step 5$"):
            checkpointer(saved).restore(abstract)
        (newest / name).write_bytes(before)
    restored, _ = checkpointer(saved).restore(abstract)
    toy.assert_equal(restored, toy.state(toy.mesh(4, 2)))


def test_parameters_alone_are_verified_too(saved, toy):
    (array, *_) = sorted((saved / "step_00000010").glob("state/ocdbt.process_0/d/*"))
    flip_the_middle(array)
    with pytest.raises(CheckpointCorrupt, match=f"ocdbt.process_0/d/{array.name} has another che"):
        checkpointer(saved).restore_params(toy.abstract(toy.mesh(1, 1))["params"])


def test_a_checkpoint_without_sums_loads_with_one_line(saved, toy, caplog):
    (saved / "step_00000010" / SUMS).unlink()
    with caplog.at_level(logging.INFO, logger="mtjax"):
        checkpointer(saved).restore(toy.abstract(toy.mesh(1, 1)))
    lines = [r.getMessage() for r in caplog.records if "without checksums" in r.getMessage()]
    assert len(lines) == 1 and "step_00000010" in lines[0]


# tensorstore finishes its other reads after the first error, into a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cut_off_array_that_no_sum_tells_of_is_damage_in_one_line(saved, toy):
    for file in (saved / "step_00000010").glob("state/**/d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointCorrupt, match=r"step_00000010 is damaged") as error:
        checkpointer(saved, verify=False).restore(toy.abstract(toy.mesh(1, 1)))
    text = str(error.value)
    assert "\n" not in text and "pybind11" not in text and "spec" not in text
    assert text.endswith("--checkpoint.restore_step 5")


def test_verify_off_neither_writes_nor_compares(tmp_path, toy):
    state = toy.state(toy.mesh(1, 1))
    with checkpointer(tmp_path / "off", verify=False) as writer:
        writer.save(1, state, {})
    assert not (tmp_path / "off" / "step_00000001" / SUMS).exists()
    with checkpointer(tmp_path / "on") as writer:
        writer.save(1, state, {})
    (tmp_path / "on" / "step_00000001" / SUMS).write_text("{}x")
    abstract = toy.abstract(toy.mesh(1, 1))
    checkpointer(tmp_path / "on", verify=False).restore(abstract)
    with pytest.raises(CheckpointCorrupt, match=r"sums\.json"):
        checkpointer(tmp_path / "on").restore(abstract)


def test_a_save_leaves_only_the_one_file_of_sums(saved):
    assert not list((saved / "step_00000010" / "state").glob("sums*"))


def test_the_sum_is_the_crc_32_of_its_published_check_value(tmp_path):
    (tmp_path / "check").write_bytes(b"123456789")
    assert sums.sum_files(tmp_path, [tmp_path / "check"]) == {"check": [9, 0xCBF43926]}


def test_the_shares_of_all_processes_cover_each_file_once(tmp_path):
    for number in range(7):
        (tmp_path / f"f{number}").write_bytes(bytes(100 * number))
    expected = sums.sum_files(tmp_path, sums.files_under(tmp_path))
    for name in expected:
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"x" + before)
        found = [sums.first_damage(tmp_path, expected, (k, 3)) for k in range(3)]
        assert sum(bool(text) for text in found) == 1
        (tmp_path / name).write_bytes(before)


def test_a_missing_and_an_unreadable_file_are_told_apart(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    expected = sums.sum_files(tmp_path, sums.files_under(tmp_path))
    (tmp_path / "a").unlink()
    assert sums.first_damage(tmp_path, expected) == "a is missing"
    (tmp_path / "a").mkdir()
    assert sums.first_damage(tmp_path, {"a": [(tmp_path / "a").stat().st_size, 0]}) == (
        "a can't be read: Is a directory"
    )
    shutil.rmtree(tmp_path / "a")
