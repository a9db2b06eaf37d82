"""What `launch.py parity` refuses before it computes anything."""

import pytest

from mtjax.config.mesh import parse_layout
from mtjax.training import parity as module
from tests.training.runs import tiny


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(module, "compile_step", lambda *_: pytest.fail("a step was compiled"))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("fsdp=3", r"--meshes fsdp=3: model\.embed_dim: got 32, expected a multiple of mesh.fsdp"),
        ("data=3", r"--meshes data=3: train\.batch_size: got 8, expected a multiple of"),
        ("data=2,microbatches=3", r"microbatches=3: train\.batch_size: got 8, expected a multiple"),
        ("data=16", r"--meshes data=16: train\.batch_size"),
        ("fsdp=2,tensor=2,data=4", "mesh: got 16 devices, expected at most the 8 present"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_the_reference_runs(tmp_path, layout, message):
    layouts = [parse_layout("fsdp=2"), parse_layout(layout)]
    with pytest.raises(ValueError, match=message):
        module.parity(tiny(tmp_path), layouts, 1, None)
