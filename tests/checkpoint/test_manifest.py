"""What a config change does to a resume."""

import pytest

from mtjax.checkpoint.manifest import (
    CheckpointMismatch,
    build_manifest,
    check_steps,
    compare,
    differences,
    must_match,
)
from mtjax.config.checkpoint import CheckpointConfig

CONFIG = {
    "model": {"embed_dim": 64, "blocks": [{"kind": "dense"}, {"kind": "moe"}]},
    "optimizer": {"name": "adamw", "learning_rate": 0.1},
    "train": {"steps": 10, "seed": 0},
    "run": {"directory": "a"},
}


def changed(**parts):
    return build_manifest({key: CONFIG[key] | parts.get(key, {}) for key in CONFIG}, {"fsdp": 8})


def test_differences_are_dotted_with_saved_and_current_value():
    blocks = [{"kind": "dense"}, {"kind": "dense"}]
    lines = differences(changed(), changed(model={"blocks": blocks, "bias": True}))
    assert lines == [
        "config.model.bias: absent -> true",
        'config.model.blocks.1.kind: "moe" -> "dense"',
    ]


def test_another_number_of_experts_is_told_the_way_there():
    saved, current = (changed(model={"moe": {"num_experts": n}}) for n in (4, 8))
    with pytest.raises(CheckpointMismatch, match=r"--checkpoint\.resize-from"):
        compare(saved, current, where="it", fits=lambda: False)


def test_every_change_that_matters_is_listed_in_one_error():
    with pytest.raises(CheckpointMismatch) as error:
        compare(changed(), changed(model={"embed_dim": 32}, train={"seed": 1}), where="it")
    assert "model.embed_dim: 64 -> 32\n  train.seed: 0 -> 1" in str(error.value)
    assert "--checkpoint.allow-changes model.embed_dim train.seed" in str(error.value)


def test_harmless_changes_are_returned_for_the_log():
    current = changed(train={"steps": 20}, run={"directory": "b"})
    assert compare(changed(), current, where="it") == [
        'run.directory: "a" -> "b"',
        "train.steps: 10 -> 20",
    ]


def test_allowed_prefixes_turn_an_error_into_a_line():
    current = changed(optimizer={"learning_rate": 0.2})
    lines = compare(changed(), current, where="it", allow=["optimizer"])
    assert lines == ["optimizer.learning_rate: 0.1 -> 0.2"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.model.embed_dim", True),
        ("config.train.steps", False),
        ("config.train.steps_more", True),
        ("config.something_new", True),
        ("mesh.tensor", False),
        ("versions.jax", False),
    ],
)
def test_what_no_line_of_the_table_names_must_match(name, expected):
    assert must_match(name) is expected


def test_fewer_steps_than_were_trained_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"train.steps is 99.*at step 100.*above 100"):
        check_steps(99, 100)
    check_steps(100, 100)


@pytest.mark.parametrize("name", ["optimizer.learning-rate", "optimizer.learning_rate"])
def test_an_allowed_field_may_be_spelt_with_dashes(name):
    current = changed(optimizer={"learning_rate": 0.2})
    assert compare(changed(), current, where="it", allow=[name])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate?"),
        ("optimiser", "did you mean optimizer?"),
        ("xyz", "see --help"),
    ],
)
def test_allowing_a_field_that_does_not_exist_names_the_closest(name, hint):
    with pytest.raises(ValueError, match=r"checkpoint\.allow_changes") as error:
        compare(changed(), changed(), where="it", allow=[name])
    assert repr(name) in str(error.value) and hint in str(error.value)


def test_a_field_that_only_the_checkpoint_has_can_be_allowed():
    lines = compare(changed(model={"old": 1}), changed(), where="it", allow=["model.old"])
    assert lines == ["model.old: 1 -> absent"]


def test_a_change_of_the_arrays_is_not_offered_to_be_allowed():
    with pytest.raises(CheckpointMismatch) as error:
        compare(changed(), changed(model={"embed_dim": 32}), where="it", fits=lambda: False)
    assert "model.embed_dim: 64 -> 32" in str(error.value)
    assert "can't be allowed" in str(error.value)
    assert "--checkpoint.allow-changes" not in str(error.value)


def test_what_was_allowed_already_is_part_of_the_offer():
    current = changed(model={"embed_dim": 32}, optimizer={"learning_rate": 0.2})
    with pytest.raises(CheckpointMismatch) as error:
        compare(changed(), current, where="it", allow=["optimizer"])
    assert "--checkpoint.allow-changes optimizer model.embed_dim" in str(error.value)


def test_an_allowed_change_is_named_where_the_arrays_do_not_fit():
    current = changed(model={"embed_dim": 32}, train={"seed": 1})
    with pytest.raises(CheckpointMismatch) as error:
        compare(changed(), current, where="it", allow=["model"], fits=lambda: False)
    assert "train.seed: 0 -> 1\n  model.embed_dim: 64 -> 32 (allowed)" in str(error.value)
    # Nor may it stay where nothing else differs.
    with pytest.raises(CheckpointMismatch, match=r"(?s)64 -> 32 \(allowed\).*can't be allowed"):
        compare(
            changed(),
            changed(model={"embed_dim": 32}),
            where="it",
            allow=["model"],
            fits=lambda: False,
        )


def test_a_value_that_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="not plain"):
        build_manifest({"model": object()}, {})


def test_saves_are_due_at_multiples_and_at_the_end():
    config = CheckpointConfig(every_steps=4)
    assert [step for step in range(11) if config.due(step, 10)] == [4, 8, 10]
    assert not any(CheckpointConfig(every_steps=0, at_end=False).due(s, 10) for s in range(11))


def test_contradicting_resume_settings_are_refused():
    with pytest.raises(ValueError, match="restore_step is 3 while"):
        CheckpointConfig(restore_step=3, resume="never")
