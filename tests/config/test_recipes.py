"""Recipes load, validate, and change only when somebody means it."""

import dataclasses
import json
from pathlib import Path

import pytest

from mtjax.config import Config, validate
from mtjax.planning.flops import (
    count_active_params,
    count_mtp_params,
    count_params,
    flops_per_token,
)
from mtjax.recipes import find_recipe, load_recipe, trace

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))

# Published counts (shared with the model cards), and GFLOP per token worked out from the formula
# 6 * (matrix entries) + 6 * L * T * N * H at the recipe's sequence length.
PARAMS = {
    "gpt2_124m": 124_439_808,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "moe_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_419_200,
    "gpt_oss_20b": 20_914_757_184,
}
GFLOP_PER_TOKEN = {"llama2_7b": 42.8637, "llama3_8b": 51.4704, "moe_8x7b": 79.7065}
GFLOP_PER_TOKEN["deepseek_v3"] = 259.9930  # with multi-token prediction


def test_the_promised_recipes_are_there():
    promised = {"tiny_gpt", "gpt2_124m", "gpt3_175b", "llama2_7b", "llama3_8b", "llama3_70b"}
    promised |= {"tiny_moe", "moe_8x7b", "mixtral_8x22b", "qwen3_30b_a3b", "gpt_oss_20b"}
    promised |= {"deepseek_v2_lite", "deepseek_v2", "deepseek_v3"}
    assert promised <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_validates_and_equals_its_golden_dump(name):
    config, _ = load_recipe(name)
    validate(config)
    dump = json.loads(json.dumps(dataclasses.asdict(config)))
    path = GOLDEN / f"{name}.json"
    expected = json.loads(path.read_text(encoding="utf-8"))
    assert dump == expected, (
        f"{name} differs from {path.name}. If a recipe or a default was changed on purpose, run "
        "python tests/config/write_goldens.py and review the difference"
    )


def test_every_golden_dump_has_a_recipe():
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == RECIPES


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_a_preset_has_the_published_number_of_parameters(name):
    config, _ = load_recipe(name)
    assert count_params(config.model) == PARAMS[name]


@pytest.mark.parametrize(
    ("name", "D", "L", "dense", "N", "q", "E", "k", "F", "shared", "first", "V"),
    [
        ("deepseek_v2_lite", 2048, 27, 10944, 16, 0, 64, 6, 1408, 2, 1, 102400),
        ("deepseek_v2", 5120, 60, 12288, 128, 1536, 160, 6, 1536, 2, 1, 102400),
        ("deepseek_v3", 7168, 61, 18432, 128, 1536, 256, 8, 2048, 1, 3, 129280),
    ],
)
def test_deepseek_counts_follow_from_the_sizes_in_the_papers(
    name, D, L, dense, N, q, E, k, F, shared, first, V
):
    """Heads of 128 + 64 for queries and keys and 128 for values, latents of 512."""
    queries = D * q + q + q * N * 192 if q else D * N * 192
    attention = queries + D * (512 + 64) + 512 + 512 * N * (128 + 128) + N * 128 * D
    bias = E if name == "deepseek_v3" else 0
    sparse = 3 * D * F * (E + shared) + E * D + bias
    model = load_recipe(name)[0].model
    expected = (
        L * (attention + 2 * D) + first * 3 * D * dense + (L - first) * sparse + 2 * V * D + D
    )
    assert count_params(model) == expected
    assert count_active_params(model) == expected - (L - first) * 3 * D * F * (E - k)
    module = attention + 2 * D + sparse + 2 * D * D + 3 * D
    assert count_mtp_params(model) == (module if name == "deepseek_v3" else 0)


def test_gpt3_follows_the_formula_of_narayanan():
    config, _ = load_recipe("gpt3_175b")
    h, layers, V, s = 12288, 96, 50257, 2048
    exact = 12 * layers * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * layers * h))
    # The formula leaves out the last norm's scale and bias.
    assert count_params(config.model) == round(exact) + 2 * h


@pytest.mark.parametrize("name", sorted(GFLOP_PER_TOKEN))
def test_a_preset_has_the_published_flops_per_token(name):
    config, _ = load_recipe(name)
    flops = flops_per_token(config.model, config.train.seq_len)
    assert flops / 1e9 == pytest.approx(GFLOP_PER_TOKEN[name], abs=5e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is_where_it_runs_and_how(name):
    text = find_recipe(name).read_text(encoding="utf-8")
    docstring = text.split('"""')[1]
    for word in ("Hardware:", f"python launch.py --config {name}.py", "Expected:"):
        assert word in docstring


def test_a_recipe_is_found_by_name_by_file_name_and_by_path(tmp_path):
    copy = tmp_path / "mine.py"
    copy.write_text(find_recipe("tiny_gpt").read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("tiny_gpt", "tiny_gpt.py", str(copy)):
        assert load_recipe(name)[0] == load_recipe("tiny_gpt")[0]


def test_an_unknown_recipe_names_the_closest():
    with pytest.raises(ValueError, match=r"did you mean llama3_8b\.py"):
        find_recipe("lama3_8b")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ModelConfig(num_layer=3)", "ModelConfig has no field 'num_layer'; did you mean"),
        ("ModelConfig(num_layers=-3)", "got -3, expected a positive integer"),
        ("AttentionConfig(num_head=3)", "did you mean 'num_heads'"),
        ("ModlConfig()", "ModlConfig"),
        ("3", "returned int, expected mtjax.config.Config"),
    ],
)
def test_a_wrong_recipe_fails_with_its_file_and_the_fix(tmp_path, body, message):
    path = tmp_path / "broken.py"
    path.write_text(
        f"from mtjax.config import *\nfrom mtjax.config import ModelConfig, AttentionConfig\n"
        f"def get_config():\n    return {body}\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=r"broken\.py") as caught:
        load_recipe(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{}['x']", "line 2: KeyError: 'x'"),
        ("1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("int('x')", "line 2: ValueError: invalid literal"),
        ("open('/absent')", "line 2: FileNotFoundError: [Errno 2] No such file"),
        ("1 + 'a'", "line 2: TypeError: unsupported operand"),
        ("exit(3)", "line 2: SystemExit: 3"),
        ("__import__('absent_module')", "line 2: ModuleNotFoundError: No module named"),
        (")", "line 2)"),
    ],
)
@pytest.mark.parametrize("place", ["return ", "global x; x = "])
def test_whatever_a_recipe_raises_is_one_line_with_file_line_and_exception(
    tmp_path, body, message, place
):
    path = tmp_path / "raises.py"
    path.write_text(f"def get_config():\n    {place}{body}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"raises\.py") as caught:
        load_recipe(str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_while_a_recipe_is_imported_names_its_line(tmp_path):
    path = tmp_path / "early.py"
    path.write_text("\n\nx = {}['a']\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"early\.py, line 3: KeyError: 'a'"):
        load_recipe(str(path))


def test_a_recipe_without_get_config_says_so(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="get_config"):
        load_recipe(str(path))


def test_provenance_tells_recipe_values_from_overrides():
    recipe, path = load_recipe("tiny_gpt")
    train = dataclasses.replace(recipe.train, steps=7)
    found = {p.field: p for p in trace(recipe, path, dataclasses.replace(recipe, train=train))}
    assert (found["train.steps"].value, found["train.steps"].source) == (7, "command line")
    assert found["precision"].source == str(path)
    assert "model.norm" not in found, "defaults are left out"
    assert Config().model.norm == recipe.model.norm
