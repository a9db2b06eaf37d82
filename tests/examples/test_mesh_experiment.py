"""The examples run as they are written."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_mesh_experiment_finds_one_result_on_every_mesh():
    script = ROOT / "examples" / "mesh_experiment.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights bit-equal") == 3
    assert "fsdp=2, tensor=4" in done.stdout and "MiB per device" in done.stdout
