"""The command line refuses what is wrong before jax is even imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mtjax
from mtjax.cli import COMMANDS
from mtjax.options import check_words, options_of

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
        (["generate", "--config", "tiny_gpt", "--seed", "-1"], ["seed: got -1", "0 to 2**32 - 1"]),
        (["generate", "--config", "tiny_gpt", "--seed", f"{2**32}"], [f"seed: got {2**32}"]),
        (
            ["generate", "--config", "tiny_gpt", "--prompt", "caf\udce9"],
            ["--prompt: got 'caf\\udce9"],
        ),
        (["--config", "tiny_gpt", "--hlep"], ["--hlep: an unknown option; did you mean --help"]),
        (["--config", "tiny_gpt", "--mesh.rows", "2"], ["--mesh.data or --mesh.fsdp"]),
        (["--config", "tiny_gpt", "--num-layers", "2"], ["did you mean --model.num-layers"]),
        (["--config", "tiny_gpt", "--train_steps", "2"], ["did you mean --train.steps"]),
        (["--config", "tiny_gpt", "train.steps=3"], ["train.steps=3: a word", "--train.steps"]),
        (["--config", "tiny_gpt", "--train.steps", "3", "4"], ["4: a word that belongs to no"]),
        (
            ["--config", "tiny_gpt", "--train.steps", "3", "--train.steps=2"],
            ["got it twice ('--train.steps 3' and '--train.steps 2')"],
        ),
        (
            ["--config", "tiny_gpt", "--run.metrics.plot", "--run.metrics.no_plot"],
            ["'--run.metrics.plot' and '--run.metrics.no_plot'"],
        ),
        (["--config", "a", "--config=b"], ["--config: got it twice (a and b)"]),
        (["parity", "--config", "tiny_gpt", "--meshes", "fsdp=3"], ["fsdp=3: model.embed_dim"]),
        (["parity", "--config", "tiny_gpt", "--meshes", "data=3"], ["data=3: train.batch_size"]),
        (
            ["parity", "--config", "tiny_gpt", "--meshes", "data=2,microbatches=16"],
            ["microbatches=16: train.batch_size"],
        ),
        (
            ["parity", "--config", "tiny_gpt", "--meshes", "data=2", "--steps", "0"],
            ["--steps: got 0, expected at least 1"],
        ),
        (
            ["parity", "--config", "tiny_gpt", "--meshes", "data=2", "--tolerance", "-1"],
            ["--tolerance: got -1.0"],
        ),
        (
            ["plan", "--config", "tiny_gpt", "--target", "cpu:1", "--output", "/proc/plan"],
            ["--output: got '/proc/plan', which can't be written"],
        ),
        (["prepare", "--path", "a", "--output", "b"], ["did you mean --paths"]),
        (["prepare", "--paths", "a", "--output", "/proc/o"], ["--output: got '/proc'"]),
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


def test_version_is_printed():
    done = launch("--version")
    assert (done.returncode, done.stdout) == (0, f"mtjax {mtjax.__version__}\n")


def test_every_option_that_help_shows_is_known_and_no_other():
    for command, (cls, _) in COMMANDS.items():
        shown = launch(command, "--config", "tiny_gpt", "--help").stdout
        helped = set(re.findall(r"--[a-z][\w.-]*", shown)) - {"--help", "--config"}
        known = {option.name for option in options_of(cls)}
        # A default in a text may break a long name; all whole ones are options.
        assert known <= helped, known - helped
        assert {name for name in helped if "." in name} <= known


def test_options_that_take_several_values_end_at_the_next_option():
    args = ["--data.paths", "a", "b", "--mesh.data", "-1", "--model.attention.windows", "64", "0"]
    check_words(args, COMMANDS["train"][0])
    check_words(["--train.batch_size=4", "--no-search"], COMMANDS["plan"][0])


def test_help_without_a_recipe_lists_commands_and_recipes():
    done = launch("--help")
    assert done.returncode == 0
    for word in ("train", "evaluate", "generate", "parity", "prepare", "tiny_gpt", "llama3_8b"):
        assert word in done.stdout
