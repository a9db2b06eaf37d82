"""Fixtures of the tests that compile for GPUs which are not there."""

import pytest


@pytest.fixture(scope="session")
def h200_mesh():
    """make(**axis_sizes): a mesh over one H200 host per 8 devices; skips without the plugin."""
    compile_module = pytest.importorskip("mtjax.planning.compile")
    missing = compile_module.cuda_plugin_missing()
    if missing:
        pytest.skip(missing)

    def make(**axis_sizes):
        num_devices = 1
        for size in axis_sizes.values():
            num_devices *= size
        hosts, gpus = max(1, num_devices // 8), min(8, num_devices)
        return compile_module.make_target_mesh(f"h200:{hosts}x{gpus}", **axis_sizes)

    return make
