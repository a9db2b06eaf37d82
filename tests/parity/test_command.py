"""What `launch.py parity` refuses before it computes anything, and how it compares."""

import numpy as np
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


@pytest.mark.parametrize(
    ("gradients", "error", "worst"),
    [
        ([[1.0, 2.0]], 0.0, "b"),
        ([[1.0, 3.0]], 0.5, "b"),
        ([[9.0, 9.0], [1.1, 2.0]], 0.1, "a"),
        ([[np.nan, 2.0]], np.inf, "a"),
    ],
)
def test_gradients_are_compared_leaf_by_leaf_on_the_batch_that_agrees_best(gradients, error, worst):
    def ran(batches):
        trees = [{"a": np.array([a]), "b": np.array([b])} for a, b in batches]
        return module.LayoutRun({}, trees, [1.0], [1.0])

    found = module.compare(ran([[1.0, 2.0]] * len(gradients)), ran(gradients), 1e-5)
    assert found.gradient == pytest.approx(error) and found.worst == worst


@pytest.mark.parametrize("name", ["losses", "grad_norms"])
def test_a_step_that_is_nan_on_one_layout_is_no_agreement(name):
    reference = module.LayoutRun({}, [{"a": np.ones(1)}], [1.0, 1.0], [1.0, 1.0])
    found = module.compare(reference, reference._replace(**{name: [1.0, np.nan]}), 1e-5)
    assert max(found.loss, found.grad_norm) == np.inf
