"""The command line refuses what is wrong before jax is even imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    """Run launch.py where importing jax is an error."""
    code = (
        "import sys; sys.modules['jax'] = None; from mtjax.cli import main; "
        "raise SystemExit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        (["--config", "tiny_gtp.py"], ["did you mean tiny_gpt.py"]),
        (["--config", "tiny_gpt", "--model.num-layer", "4"], ["--model.num-layers"]),
        (
            ["--config", "tiny_gpt", "--optimizer.schedule.warmup-step", "4"],
            ["--optimizer.schedule.warmup-steps"],
        ),
        (["--config", "tiny_gpt", "--run.faults.spike-rato", "4"], ["--run.faults.spike-ratio"]),
        (["--config", "tiny_gpt", "--precision", "fp17"], ["fp17", "bf16"]),
        (["--config", "tiny_gpt", "--model.num-layers", "four"], ["four"]),
        (["--config", "tiny_gpt", "--train.batch-size", "15", "--train.microbatches", "2"], ["15"]),
        (["--config", "tiny_gpt", "--mesh.tensor", "5"], ["model.attention.num_heads", "5"]),
        (
            ["--config", "tiny_gpt", "--optimizer.beta2-decay", "0.5"],
            ["nothing reads it while"],
        ),
        (["--config", "tiny_gpt", "--train.remat-save", "qvk"], ["train.remat"]),
        (["--config", "tiny_gpt", "--model.rope.factor", "4"], ["rope.scaling"]),
        (["trian", "--config", "tiny_gpt"], ["did you mean", "train"]),
        (["--confg", "tiny_gpt"], ["--config"]),
        (["parity", "--config", "tiny_gpt"], ["--meshes"]),
        (["parity", "--config", "tiny_gpt", "--meshes", "tensr=2"], ["did you mean tensor=N"]),
        (["generate", "--config", "tiny_gpt", "--top-p", "1.5"], ["top_p", "(0, 1]"]),
    ],
)
def test_a_wrong_command_line_fails_with_what_to_do(args, messages):
    done = launch(*args)
    assert done.returncode == 2, done.stdout + done.stderr
    shown = " ".join((done.stdout + done.stderr).replace("\u2502", " ").split())
    for message in messages:
        assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "parity"])
def test_help_shows_every_field_with_its_meaning(command):
    done = launch(command, "--config", "tiny_gpt", "--help")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.replace("\u2502", " ").split())
    assert "--model.attention.num-heads" in shown
    assert "Query heads N." in shown


def test_help_without_a_recipe_lists_commands_and_recipes():
    done = launch("--help")
    assert done.returncode == 0
    for word in ("train", "evaluate", "generate", "parity", "prepare", "tiny_gpt", "llama3_8b"):
        assert word in done.stdout
