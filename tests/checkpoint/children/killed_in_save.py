"""Saves step 1, then kills itself in the middle of saving step 2.

Arguments: directory, and the moment: "arrays" before the array files are complete, "commit" when
they are and the folder still has its temporary name.
"""

import os
import pathlib
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

import jax.numpy as jnp
from orbax.checkpoint._src.path import atomicity
from orbax.checkpoint._src.serialization import jax_array_handlers

from mtjax.checkpoint.manager import Checkpointer
from mtjax.checkpoint.manifest import build_manifest
from mtjax.config.checkpoint import CheckpointConfig


async def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


directory, moment = sys.argv[1:]
manifest = build_manifest({"model": {"embed_dim": 64}, "train": {"steps": 10}}, {"fsdp": 4})
writer = Checkpointer(directory, CheckpointConfig(), manifest)
writer.save(1, {"x": jnp.full(1000, 1.0)}, {"position": 1}, wait=True)
if moment == "arrays":
    jax_array_handlers.ArrayHandler.finalize = kill
    jax_array_handlers._async_serialize_replica_slices = kill
else:
    atomicity.AtomicRenameTemporaryPath.finalize = kill
writer.save(2, {"x": jnp.full(1000, 2.0)}, {"position": 2}, wait=True)
raise SystemExit("the save was not interrupted")
