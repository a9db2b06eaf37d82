"""One process of a run on CPU devices: `two_processes.py ROLE PORT COUNT ID DIRECTORY`.

Roles: train (psum, save, restore, agree on a stop), hang (process 1 sleeps in step 3), die
(process 1 is killed in step 3), raise (process 1 raises in step 3), stop (process 1 sends itself
SIGTERM in step 2).
"""

import os
import pathlib
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

from mtjax.config.run import DistributedConfig
from mtjax.operation import distributed

ROLE, PORT, COUNT, ID, DIRECTORY = sys.argv[1:]


def main() -> None:
    distributed.initialize(
        DistributedConfig(
            mode="explicit",
            coordinator=f"127.0.0.1:{PORT}",
            num_processes=int(COUNT),
            process_id=int(ID),
            timeout_s=int(os.environ.get("TEST_TIMEOUT_S", "30")),
            heartbeat_timeout_s=10,
        )
    )
    import jax

    from mtjax.operation.faults import StopRequest, Watchdog

    watchdog = Watchdog(
        2.0,
        DIRECTORY,
        startup_s=60.0,
        process_index=jax.process_index(),
        board=distributed.BeatBoard(),
    )
    with watchdog, StopRequest() as stop, distributed.ending_together():
        train(watchdog, stop)
    print("done", flush=True)


def train(watchdog, stop) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x_B = jax.jit(lambda: jnp.arange(1.0, 9.0), out_shardings=sharding)()
    step_fn = jax.jit(lambda x_B: (x_B + 1, jnp.sum(x_B * x_B)))
    for step in range(1, 7):
        if step == 3 and ID == "1":
            misbehave()
        x_B, loss = step_fn(x_B)
        print(f"step {step} loss {float(loss):.1f}", flush=True)
        watchdog.beat(step)
        if ROLE == "stop" and step == 2 and ID == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.agreed():
            print(f"stopped after step {step}", flush=True)
            break
    with watchdog.phase("the checkpoint", 30.0):
        save_and_restore(x_B, sharding)


def misbehave() -> None:
    if ROLE == "hang":
        while True:
            time.sleep(3600)
    if ROLE == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if ROLE == "raise":
        raise OSError("the disk is gone")


def save_and_restore(x_B, sharding) -> None:
    import jax
    import jax.numpy as jnp

    from mtjax.checkpoint.manager import Checkpointer
    from mtjax.checkpoint.manifest import build_manifest
    from mtjax.config.checkpoint import CheckpointConfig
    from mtjax.operation.faults import agree

    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    key = jax.jit(lambda: jax.random.key(3), out_shardings=replicated)()
    state = {"x": x_B, "step": jnp.int32(6), "key": key}

    def place(leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding if leaf.ndim else replicated
        )

    manifest = build_manifest({"model": {}}, {"data": 4})
    with Checkpointer(f"{DIRECTORY}/checkpoints", CheckpointConfig(), manifest) as checkpoints:
        checkpoints.save(6, state, {"position": 6})
        checkpoints.wait()
        restored, data_state = checkpoints.restore(jax.tree.map(place, state))
    assert data_state == {"position": 6}
    for shard, other in zip(restored["x"].addressable_shards, x_B.addressable_shards, strict=True):
        assert (shard.data == other.data).all()
    assert int(restored["step"].addressable_data(0)) == 6
    assert agree(ID == "1") and not agree(False)
    if distributed.is_main_process():
        print("saved and restored", flush=True)


if __name__ == "__main__":
    try:
        main()
    except distributed.PeerError as error:
        raise SystemExit(str(error)) from None
