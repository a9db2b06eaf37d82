"""One of two processes: `two_processes.py PORT ID FEATURE LAYOUT FILE`.

Writes the gradients of the first step of a model of test_combinations.py, from process 0.
"""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
)
sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

from mtjax.config.run import DistributedConfig
from mtjax.operation import distributed

PORT, ID, FEATURE, LAYOUT, FILE = sys.argv[1:]


def main() -> None:
    distributed.initialize(
        DistributedConfig(
            mode="explicit",
            coordinator=f"127.0.0.1:{PORT}",
            num_processes=2,
            process_id=int(ID),
            timeout_s=120,
        )
    )
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    from mtjax.training.state import create_state
    from mtjax.training.step import abstract_batch
    from tests.parity.layouts import by_name, compile_gradients, make_batch, on_layout
    from tests.parity.test_combinations import FEATURES

    config, mesh, setup = on_layout(FEATURES[FEATURE], LAYOUT)
    params = create_state(config, mesh, setup).params
    batch = jax.tree.map(
        lambda x, a: jax.make_array_from_callback(a.shape, a.sharding, lambda index: x[index]),
        make_batch(config),
        abstract_batch(config, mesh),
    )
    compiled = compile_gradients(config, mesh, setup, params, batch)
    found = process_allgather(compiled(params, batch)[1], tiled=True)
    if jax.process_index() == 0:
        np.savez(FILE, **by_name(found))


if __name__ == "__main__":
    main()
