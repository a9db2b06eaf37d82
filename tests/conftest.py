"""Eight virtual CPU devices for every test, asked for before anything imports jax."""

import os

_FLAG = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
