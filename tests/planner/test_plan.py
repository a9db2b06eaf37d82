"""The plan command on small models: what it reports, saves and refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from mtjax.cli import main
from mtjax.config import (
    AttentionConfig,
    BatchRampConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    QuantizeConfig,
    RunConfig,
    TrainConfig,
    validate,
)
from mtjax.planner import command
from mtjax.planner import place as place_module
from mtjax.planner.changes import smaller, try_changes
from mtjax.planner.layouts import candidates, factorisations, sent_bytes
from mtjax.planner.memory import estimate_memory
from mtjax.planner.page import to_html
from mtjax.planner.place import Place, parse_place
from mtjax.planner.program import StepProgram, build_step, compile_step_for
from mtjax.planner.report import Plan, expansions, make_plan
from mtjax.planner.search import ranking_text, search_layouts
from mtjax.planner.text import changes_text, to_json, to_text
from mtjax.planning.asked import asked_flops
from mtjax.planning.compile import compile_for
from mtjax.planning.gpus import GPUS
from mtjax.planning.subprocess_compile import CompileFailed
from mtjax.planning.targets import Target, parse_target
from mtjax.recipes import Origin, load_recipe

LAYERS, EMBED, FFN, HEADS, VOCAB, SEQ, BATCH = 4, 256, 1024, 8, 1024, 512, 16
BASE = Config(
    model=ModelConfig(
        vocab_size=VOCAB - 24,
        embed_dim=EMBED,
        num_layers=LAYERS,
        ffn_dim=FFN,
        attention=AttentionConfig(num_heads=HEADS, head_dim=32),
    ),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(seq_len=SEQ, batch_size=BATCH, microbatches=2, remat="full"),
)
PARAMS = LAYERS * (4 * EMBED * EMBED + 3 * EMBED * FFN) + 2 * VOCAB * EMBED + 9 * EMBED
H200 = parse_target("h200:1x8")


def on_mesh(**sizes):
    return validate(dataclasses.replace(BASE, mesh=MeshConfig(**sizes)))


@pytest.fixture(scope="module")
def step(h200_mesh):
    return build_step(on_mesh(data=8), H200)


@pytest.fixture(scope="module")
def plan(step) -> Plan:
    return make_plan(step, H200, "small")


def test_the_layout_counts_parameters_and_padding(plan):
    assert plan.layout.params == PARAMS - 2 * 24 * EMBED
    assert plan.layout.padding_params == 2 * 24 * EMBED
    assert plan.layout.params_per_device == PARAMS
    assert plan.layout.mesh == {"data": 8}


def test_plain_data_parallelism_has_the_textbook_volume(step):
    # ZeRO-1 (Rajbhandari et al. 2020): weights out in bf16, gradients in as float32, once.
    volume = (2 + 4) * PARAMS * 7 / 8
    assert step.program.summary.wire_bytes("data") == pytest.approx(volume, rel=0.05)


def test_json_holds_every_number(plan):
    record = json.loads(to_json(plan))
    assert record["memory"]["total_bytes"] == plan.memory.total_bytes
    assert record["memory"]["fits"] is True
    assert record["time"]["step_s"] == plan.time.step_s
    assert {row["kind"] for row in record["traffic"]} >= {"all-gather", "reduce-scatter"}


def test_text_says_what_a_user_asks_first(plan):
    text = to_text(plan)
    assert text.startswith("small on h200:1x8\nLayout: data=8 on 8 devices, 2 microbatches")
    assert "fits in 139.0 GiB" in text and "of padding" in text
    assert "Time: at least" in text and "no latency and no contention" in text


def test_the_page_is_one_file_with_pictures(plan):
    page = to_html(plan)
    assert page.count("<svg") == 2 and "http" not in page.split("</style>")[1].split("<svg")[0]
    assert 'src="' not in page and "<link" not in page
    assert "<h1>small on h200:1x8</h1>" in page


def test_the_formula_of_memory_follows_megatron():
    # 18 bytes per parameter; 6 + 12 / d with the optimizer split over d (ZeRO-1).
    for data, bytes_per_param in ((1, 18), (8, 6 + 12 / 8)):
        parts = estimate_memory(on_mesh(data=data))
        state = sum(
            parts[name]
            for name in ("parameters and optimizer", "weights in the compute dtype", "gradients")
        )
        assert state == pytest.approx(bytes_per_param * PARAMS, rel=0.002)
    # Korthikanti et al. 2022: full recomputation keeps 2sbh per layer.
    saved = estimate_memory(on_mesh())["saved activations"]
    assert saved == 2 * SEQ * (BATCH / 2) * EMBED * LAYERS


def test_the_formula_of_memory_knows_latents_and_modules_of_multi_token_prediction():
    """XLA assigned 82.96 GiB for this layout of 256 H200, of which 8 + 8 + 4 + 4 are scores."""
    recipe = load_recipe("deepseek_v3")[0]
    train = dataclasses.replace(recipe.train, microbatches=60, batch_ramp=BatchRampConfig())
    config = dataclasses.replace(recipe, mesh=MeshConfig(fsdp=8, expert=32), train=train)
    parts = estimate_memory(validate(config))
    assert sum(parts.values()) / 2**30 == pytest.approx(82.96, rel=0.03)
    params = 671_026_419_200 + 11_610_068_224
    assert parts["parameters and optimizer"] == pytest.approx(12 * params / 256, rel=1e-3)
    # The input of 61 blocks and one module, of 4096 tokens.
    assert parts["saved activations"] == 2 * 4096 * 7168 * 62
    latent = dataclasses.replace(train, remat="selective", remat_save=("latent",))
    more = estimate_memory(dataclasses.replace(config, train=latent))["saved activations"]
    assert more - parts["saved activations"] == 2 * 4096 * (512 + 1536) * 62


def test_the_formula_of_memory_knows_who_writes_attention_weights():
    """Kept where nothing is recomputed: per query and key four bytes and two."""
    base = on_mesh(tensor=2)
    base = dataclasses.replace(base, train=dataclasses.replace(base.train, remat="none"))
    written = dataclasses.replace(base, model=base.model.with_attention("xla"))
    with_them, without = (estimate_memory(c)["saved activations"] for c in (written, base))
    assert with_them - without == (4 + 2) * LAYERS * BATCH / 2 * SEQ**2 * HEADS / 2


def test_formulas_of_split_sequences():
    """As fsdp for weights and tokens; keys and values go round on top."""
    whole, split = on_mesh(fsdp=2), on_mesh(context=2)
    for name in ("parameters and optimizer", "gradients", "saved activations"):
        assert estimate_memory(split)[name] == estimate_memory(whole)[name]
    kv = 2 * LAYERS * EMBED * SEQ * BATCH / 2
    # Ring of two: once in bf16 each way, and the gradients twice in float32.
    assert sent_bytes(split) - sent_bytes(whole) == pytest.approx((2 + 2 + 2 * 4) * kv)


def small_gpu(gib):
    gpu = dataclasses.replace(GPUS["h200"], name="small", memory_bytes=int(gib * 2**30))
    return Place(Target(gpu, 1, 8), 8, virtual=False)


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_told_what_helps(h200_mesh):
    place = small_gpu(2.05)
    config = place.resolve(dataclasses.replace(on_mesh(data=8)))
    found = make_plan(build_step(config, place.devices), place.target)
    assert found.memory.fits is False and found.memory.headroom_bytes < 0
    changes = try_changes(config, place, 2, 300)
    assert len(changes) == 2
    assert all(change.total_bytes < found.memory.total_bytes for change in changes)
    assert any("--mesh.fsdp 2" in flags for flags, _ in smaller(config, place))
    text = changes_text(dataclasses.replace(found, changes=changes))
    assert changes[0].flags in text and "does not fit" in to_text(found)


def test_every_mesh_of_the_devices_is_a_candidate_or_counted():
    assert len(list(factorisations(8, 3))) == 10
    found, invalid = candidates(BASE, 8, {})
    assert len(found) + invalid == len(list(factorisations(8, len(BASE.mesh.sizes))))
    # One row per device and microbatch is left, so accumulation must end.
    assert {c.config.train.microbatches for c in found} == {2}
    assert all(c.config.mesh.resolve(8) for c in found)
    assert found == sorted(found, key=lambda c: c.sent_bytes)
    fixed, _ = candidates(BASE, 8, {"tensor": 2})
    assert fixed == [c for c in found if c.config.mesh.tensor == 2] and fixed


@pytest.mark.slow
def test_a_search_ranks_what_fits_and_prints_the_command(h200_mesh):
    ranking = search_layouts(BASE, small_gpu(80), max_compiles=2, time_limit_s=300)
    assert len(ranking.tried) == 2 and not ranking.failed
    times = [found.time.step_s for _, found in ranking.tried]
    assert times == sorted(times)
    text = ranking_text(ranking, "python launch.py --config small")
    best = ranking.tried[0][0]
    assert f"python launch.py --config small {best.flags}" in text
    assert "not tried" in text and "--max-compiles" in text


def test_a_search_leaves_out_what_is_far_too_large():
    ranking = search_layouts(BASE, small_gpu(2.0001), max_compiles=2, time_limit_s=300)
    assert not ranking.tried and ranking.too_large
    text = ranking_text(ranking, "train")
    assert "layouts left out: by formula" in text and "no layout was compiled: use" in text


def test_cpu_devices_give_the_same_report_marked_as_such():
    place = parse_place("cpu:8")
    step = compile_step_for(on_mesh(fsdp=8), place.devices, 300)
    found = make_plan(step, place.target, "small", place.notes)
    assert found.target == "cpu:8" and found.time is None and found.memory.fits is None
    text = to_text(found)
    assert "virtual CPU devices" in text and "no device memory to compare with" in text
    assert {row.axes for row in found.traffic} >= {"fsdp"}
    assert found.compute.hardware_flops > found.compute.model_flops


def test_without_the_plugin_a_target_is_planned_on_cpu_devices_and_says_so(monkeypatch):
    from mtjax.planning import compile as compile_module

    reason = "no plugin; install it"
    monkeypatch.setattr(compile_module, "cuda_plugin_missing", lambda: reason)
    place = place_module.parse_place("h200:1x8")
    assert place.devices == 8 and place.target is not None
    assert reason in place.notes[0] and "h200:1x8" in place.notes[0]
    assert place.capacity_bytes > 100 * 2**30


def test_products_that_depend_on_the_gpu_at_hand_are_not_planned():
    quantize = QuantizeConfig(backend="te")
    config = dataclasses.replace(BASE, precision="fp8", quantize=quantize)
    for refused in (
        lambda: command.plan(config, "cpu:1", 300, ""),
        lambda: command.search(config, "cpu:1", 1, 300, "", Origin("recipe", [])),
    ):
        with pytest.raises(ValueError, match=r"quantize.backend: got 'te', expected xla for"):
            refused()


def test_an_expanded_ragged_product_is_named(h200_mesh):
    def experts(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    args = (
        jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    jaxpr = jax.jit(experts).trace(*args).jaxpr
    asked = asked_flops(jaxpr, 1)
    assert asked == {"dot_general": 0.0, "ragged_dot_general": 2 * 4096 * 256 * 512}
    program = compile_for(h200_mesh(fsdp=1), experts, *args)
    (warning,) = expansions(program.summary, asked)
    assert warning.startswith("ragged_dot_general: 8.0 x the FLOPs")


def test_asked_flops_multiply_loops_and_divide_by_devices():
    def f(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

    x, w = jnp.zeros((8, 16)), jnp.zeros((16, 16))
    jaxpr = jax.make_jaxpr(f)(x, w)
    assert asked_flops(jaxpr, 4)["dot_general"] == 5 * 2 * 8 * 16 * 16 / 4


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "--target: got none"),
        (["--target", "h201:1x8"], "did you mean h200?"),
        (["--target", "h200:0x8"], "expected <hosts>x<GPUs per host>"),
        (["--target", "h200:1x16"], "at most 8 for h200; write for example h200:2x8"),
        (["--target", "cpu:"], "expected cpu:<devices>"),
        (["--target", "gpu.toml:1x8"], "can't read 'gpu.toml'"),
        (["--target", "h200:4x8", "--mesh.fsdp", "8"], "expected to use the 32 of h200:4x8"),
        (["--target", "h200:1x8", "--search", "--max-compiles", "0"], "--max-compiles: got 0"),
        (["--target", "h200:1x8", "--max-compiles", "3"], "a positive number, and --search"),
        (["--target", "h200:1x8", "--time-limit-s", "nan"], "--time-limit-s: got nan"),
        (["--target", "h200:1x8", "--time-limit-s", "inf"], "seconds in (0, 1e6)"),
        (["--target", "h200:1x8", "--mesh.fsdp", "3", "--mesh.data", "-1"], "mesh"),
        (
            [
                "--target",
                "h200:1x8",
                "--mesh.fsdp",
                "8",
                "--model.moe.num-experts",
                "8",
                "--model.moe.dispatcher",
                "dropless",
            ],
            "set model.moe.dispatcher to capacity",
        ),
    ],
)
def test_bad_input_is_named_before_anything_compiles(args, text, capsys, tmp_path):
    argv = ["plan", "--config", "tiny_gpt", *args, "--run.directory", str(tmp_path)]
    assert main(argv) == 2
    assert text in capsys.readouterr().err


def test_a_compile_that_runs_out_of_time_is_an_error_and_not_a_hang():
    with pytest.raises(CompileFailed, match=r"still compiling after 0\.5 s"):
        compile_step_for(on_mesh(fsdp=8), 8, 0.5)


def test_the_command_says_in_one_line_that_a_compile_took_too_long(capsys, tmp_path):
    argv = ["plan", "--config", "tiny_gpt", "--target", "cpu:2", "--mesh.data", "2"]
    argv += ["--output", str(tmp_path)]
    assert main([*argv, "--time-limit-s", "0.5"]) == 1
    shown = capsys.readouterr().err
    assert "error: build_step: still compiling after 0.5 s; raise" in shown
    assert "Traceback" not in shown
    assert main([*argv, "--search", "--time-limit-s", "0.5", "--max-compiles", "1"]) == 1
    shown = capsys.readouterr().out
    assert "did not compile" in shown and "no layout was compiled: raise --time-limit-s" in shown


def test_a_search_keeps_the_axes_of_the_command_line_and_saves_its_plans(capsys, tmp_path):
    argv = ["plan", "--config", "tiny_gpt", "--target", "cpu:2", "--mesh.data", "2"]
    argv += ["--model.num-layers", "1", "--train.seq-len", "64", "--search", "--max-compiles", "3"]
    assert main([*argv, "--output", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "search.json").read_text())
    assert found["layout"]["mesh"] == {"data": 2}
    shown = capsys.readouterr().out
    assert "best by memory, since no rates are known, of 1 tried" in shown
    assert "--config tiny_gpt --model.num-layers 1 --train.seq-len 64 --mesh.data 2" in shown


@pytest.mark.slow
def test_the_command_saves_json_and_page(tmp_path, capsys):
    argv = ["plan", "--config", "tiny_gpt", "--target", "cpu:2", "--mesh.data", "2"]
    argv += ["--model.num-layers", "1", "--train.seq-len", "64"]
    assert main([*argv, "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["target"] == "cpu:2"
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert f"saved: {tmp_path / 'plan.json'}" in capsys.readouterr().out


def test_the_step_of_a_plan_travels_between_processes_without_its_executable(step):
    import pickle

    again: StepProgram = pickle.loads(pickle.dumps(step))
    assert again.program.executable is None and again.program.hlo == step.program.hlo
    assert again.param_rows == step.param_rows


@pytest.mark.slow
def test_a_run_folder_takes_the_plan_by_default(tmp_path):
    config = dataclasses.replace(BASE, run=RunConfig(directory=str(tmp_path / "run")))
    from mtjax.planner.command import plan as plan_command

    assert plan_command(config, "cpu:1", 300, "") == 0
    assert (tmp_path / "run" / "plan" / "plan.html").exists()
