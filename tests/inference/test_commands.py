"""`launch.py evaluate` and `launch.py generate` on the checkpoint of a run."""

import re

import pytest

from mtjax.cli import main
from mtjax.training import commands, loop
from tests.training.runs import as_flags, on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")

SAMPLE = {"train__sample_tokens": 12, "train__sample_prompt": "It is "}


@pytest.fixture(autouse=True)
def as_many_devices_as_the_mesh(monkeypatch):
    for module in (loop, commands):
        monkeypatch.setattr(module, "prepare_mesh", on_some_devices)


@pytest.fixture
def launch(tmp_path, capsys):
    """`launch(command, *arguments, **changes)`: exit code, stdout, stderr."""

    def run_command(command, *arguments, **changes):
        flags = as_flags(run__directory=str(tmp_path), **changes)
        capsys.readouterr()
        code = main([command, "--config", "tiny_gpt", *flags, *arguments])
        return code, *capsys.readouterr()

    return run_command


def test_evaluate_prints_the_last_held_out_loss_of_the_training(tmp_path, launch):
    finished = run(tiny(tmp_path, train__steps=4, checkpoint__every_steps=2))
    code, out, _ = launch("evaluate")
    assert code == 0
    assert "checkpoint of step 4, valid split" in out
    assert f"eval/loss  {finished.metrics[-1]['eval/loss']:.6g}\n" in out
    _, earlier, _ = launch("evaluate", "--checkpoint.restore-step", "2", mesh__fsdp=2)
    assert "checkpoint of step 2" in earlier
    assert f"eval/loss  {finished.metrics[-1]['eval/loss']:.6g}\n" not in earlier


def test_evaluate_compares_quantised_products_with_others(tmp_path, launch):
    run(tiny(tmp_path, train__steps=2))
    code, out, err = launch("evaluate", "--compare-precision", "--precision", "fp8")
    assert code == 0, err
    _, _, table = out.partition("first batch, the same in both\n")
    wide, narrow = (float(re.search(rf"loss {name} +(\S+)", table)[1]) for name in ("bf16", "fp8"))
    assert wide != narrow == pytest.approx(wide, rel=5e-3)
    cosine = float(re.search(r"gradient cosine  (\S+),", table)[1])
    lowest = float(re.search(r"lowest cosine    (\S+),", table)[1])
    assert 0.5 < lowest < cosine < 1 and cosine > 0.99
    code, _, err = launch("evaluate", "--compare-precision")
    assert code == 2 and "precision: got 'fp32', expected one of fp8" in err


def test_generate_writes_what_the_training_wrote_as_its_sample(tmp_path, launch, capsys):
    run(tiny(tmp_path, train__steps=3, **SAMPLE))
    printed = capsys.readouterr().out
    sample = printed.split("sample: ", 1)[1].split("run folder: ")[0]
    code, out, _ = launch("generate", "--max-tokens", "12", **SAMPLE)
    assert code == 0
    assert out == sample
    _, other, _ = launch("generate", "--max-tokens", "12", "--prompt", "It is ", "--seed", "1")
    assert other.startswith("It is ") and other != out
    _, split, _ = launch("generate", "--max-tokens", "12", **SAMPLE, mesh__tensor=2)
    assert split == out


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_without_a_checkpoint_the_command_says_where_it_looked(tmp_path, launch, command):
    code, _, err = launch(command, train__sample_tokens=1, train__sample_prompt="It")
    assert code == 2
    assert f"{tmp_path}/checkpoints holds no checkpoint" in err


def test_another_model_than_the_checkpoint_s_is_named(tmp_path, launch):
    run(tiny(tmp_path, train__steps=1))
    code, _, err = launch("evaluate", model__ffn_dim=96)
    assert code == 2
    assert "model.ffn_dim: 64 -> 96" in err
    assert "allow_changes" not in err


def test_a_change_of_the_model_that_keeps_its_arrays_is_offered_to_be_allowed(tmp_path, launch):
    run(tiny(tmp_path, train__steps=1))
    code, _, err = launch("evaluate", model__dropout=0.0)
    assert code == 2
    assert "--checkpoint.allow-changes model.dropout" in err
    assert (
        launch("evaluate", "--checkpoint.allow-changes", "model.dropout", model__dropout=0)[0] == 0
    )


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_starting_afresh_is_refused_where_a_checkpoint_is_read(launch, command):
    arguments = ("--prompt", "It") if command == "generate" else ()
    code, _, err = launch(command, "--checkpoint.resume", "never", *arguments)
    assert code == 2
    assert f"checkpoint.resume: got 'never', expected auto or must, since {command} reads" in err


def test_a_file_in_place_of_the_run_s_folder_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["evaluate", "--config", "tiny_gpt", f"--run.directory={tmp_path}/file"]) == 2
    err = capsys.readouterr().err
    assert "run.directory: got" in err and "is no file" in err


def test_a_text_beyond_the_position_table_is_refused_before_a_checkpoint_is_looked_for(launch):
    learned = {"model__position": "learned", "model__max_positions": 20}
    code, _, err = launch("generate", "--prompt", "It is ", "--max-tokens", "15", **learned)
    assert code == 2
    assert "--max-tokens: got 15, expected 6 tokens of prompt and the text within" in err
