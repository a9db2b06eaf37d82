"""What a run is refused for before a device is touched."""

import re
import sys

import pytest

from mtjax.operation.folder import FolderBusy, FolderLock
from mtjax.training import loop
from tests.training.runs import on_some_devices, tiny


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """Whoever asks for the processes of the run, which comes before its devices, fails."""
    monkeypatch.setattr(loop, "initialize", lambda _: pytest.fail("devices were asked for"))


LEARNED = {"model__position": "learned", "model__max_positions": 40}
SAMPLE = {"train__sample_prompt": "It is ", "train__sample_tokens": 35}


def test_a_sample_beyond_the_position_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train\.sample_tokens: got 35, expected 6 tokens of pr"):
        loop.train(tiny(tmp_path, **LEARNED, **SAMPLE))


def test_a_prompt_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train\.sample_prompt: got 116, expected ids below"):
        loop.train(tiny(tmp_path, model__vocab_size=100, **SAMPLE))


def test_wandb_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        loop.train(tiny(tmp_path, run__metrics__wandb=True))


def test_a_file_as_the_run_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.directory: got .*is a file"):
        loop.train(tiny(tmp_path / "file"))


def test_a_folder_in_which_a_run_goes_on_is_refused_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "initialize", lambda _: None)
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)
    with FolderLock(tmp_path), pytest.raises(FolderBusy):
        loop.train(tiny(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_a_config_made_by_a_program_is_shown_with_what_it_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)
    loop.Trainer(tiny(tmp_path))
    shown = capsys.readouterr().out
    assert re.search(r"^  train\.seq_len +16  \(caller\)$", shown, re.MULTILINE)
    assert "defaults\n" not in shown
