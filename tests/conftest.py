"""Eight virtual CPU devices for every test, asked for before anything imports jax."""

import os

import pytest

# Most of a test is compiling: without LLVM's passes it takes 40 % less time in all. Child processes
# whose bits are compared with ours must have the same.
OPTIMIZATION = "--xla_backend_optimization_level=0"

os.environ["JAX_PLATFORMS"] = "cpu"
for _flag in ("--xla_force_host_platform_device_count=8", OPTIMIZATION):
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that workers that take whole files end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory):
    """Programs compiled once in this session, also for child processes, however often run."""
    import jax

    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in settings.items()}
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def h200_mesh():
    """make(**axis_sizes): a mesh over one H200 host per 8 devices; skips without the plugin."""
    from mtjax.planning import compile as compile_module

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
