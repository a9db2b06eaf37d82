"""Where GPU programs must be tested, their tests must not skip."""

import os

import pytest

from mtjax.planning.compile import cuda_plugin_missing


@pytest.mark.skipif(
    "MTJAX_REQUIRE_CUDA_PLUGIN" not in os.environ,
    reason="MTJAX_REQUIRE_CUDA_PLUGIN is not set: this environment may lack the CUDA plugin",
)
def test_the_cuda_plugin_is_there_where_it_is_required():
    assert cuda_plugin_missing() is None
