"""Settings of experts: what they mean, and what is refused."""

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    TrainConfig,
    resolve_backends,
    validate,
)


@pytest.mark.parametrize(
    ("seq_len", "experts", "top_k", "factor", "rows"),
    [
        (4096, 8, 2, 1.25, 1280),  # 4096 * 2 / 8 * 1.25
        (4096, 8, 2, 1.0, 1024),
        (100, 8, 2, 1.0, 25),
        (10, 8, 2, 1.0, 3),  # 2.5 rounded up
        (60, 6, 1, 1.1, 11),  # 11.000000000000002 in floating point
        (16, 4, 2, 100.0, 16),  # never more than all tokens
        (1, 128, 8, 1.25, 1),
    ],
)
def test_an_expert_takes_its_share_of_a_sequence_times_the_factor_rounded_up(
    seq_len, experts, top_k, factor, rows
):
    moe = MoeConfig(num_experts=experts, top_k=top_k, capacity_factor=factor)
    assert moe.capacity(seq_len) == rows


def test_experts_that_choose_take_their_share_of_a_sequence_and_no_more():
    assert MoeConfig(**CHOICE).capacity(10) == 5


@pytest.mark.parametrize(
    ("first_dense", "every", "layers"),
    [(0, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [2, 3, 4, 5]), (0, 2, [1, 3, 5]), (1, 3, [3])],
)
def test_experts_stand_in_the_last_of_every_n_layers_above_the_dense_ones(
    first_dense, every, layers
):
    moe = MoeConfig(num_experts=4, first_dense=first_dense, every=every)
    assert [layer for layer in range(6) if moe.has_experts(layer)] == layers
    assert not any(MoeConfig().has_experts(layer) for layer in range(6))


SINKHORN = {"num_experts": 4, "router": "sinkhorn"}
CHOICE = {"num_experts": 4, "router": "expert_choice", "renormalize": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": -1}, "moe.num_experts: got -1"),
        ({"num_experts": 4, "top_k": 5}, r"moe.top_k: got 5, expected between 1 and .* \(4\)"),
        ({"num_experts": 4, "top_k": 0}, "moe.top_k: got 0"),
        ({"top_k": 1}, "while model.moe.num_experts is 0, a dense model"),
        ({"balance_coefficient": 0.1}, "while model.moe.num_experts is 0, a dense model"),
        ({"num_experts": 4, "capacity_factor": 0.0}, "moe.capacity_factor: got 0.0"),
        ({"num_experts": 4, "dispatcher": "dropless", "capacity_factor": 2.0}, "drops nothing"),
        ({"num_experts": 4, "dispatcher": "dropless", "drop_policy": "position"}, "drops nothing"),
        ({"num_experts": 4, "allow_expanded_products": True}, "expands nothing"),
        ({"num_experts": 4, "shared_gate": True}, "set model.moe.shared_ffn_dim"),
        ({"num_experts": 4, "score_bias": True}, "use router sigmoid"),
        ({"num_experts": 4, "router": "sigmoid", "bias_update_rate": 0.1}, "moe.score_bias"),
        ({"num_experts": 4, "router": "softmax_after_topk", "renormalize": False}, "add up to 1"),
        ({"num_experts": 4, "num_groups": 3}, "a divisor of model.moe.num_experts"),
        ({"num_experts": 8, "num_groups": 4, "top_groups": 5}, "moe.top_groups: got 5"),
        ({"num_experts": 8, "num_groups": 4, "top_k": 3}, "2 in each"),
        (
            {"num_experts": 4, "num_groups": 4, "top_groups": 2, "router": "sigmoid"},
            "at least two experts in each group",
        ),
        ({"num_experts": 4, "balance_scope": "global"}, "set the coefficient"),
        ({"num_experts": 4, "z_coefficient": -1.0}, "moe.z_coefficient"),
        ({"num_experts": 4, "every": 0}, "moe.every"),
        ({"num_experts": 4, "router_noise": -0.1}, "moe.router_noise"),
        ({"num_experts": 4, "device_groups": 2}, "set both or neither"),
        ({"num_experts": 4, "device_balance_coefficient": 0.1}, "set both or neither"),
        ({"num_experts": 4, "device_groups": 3}, "a divisor of model.moe.num_experts"),
        ({"num_experts": 4, "routed_scale": 0.0}, "moe.routed_scale"),
        ({"num_experts": 4, "sinkhorn_iterations": 3}, "while model.moe.router is 'softmax'"),
        (SINKHORN | {"sinkhorn_iterations": 0}, "moe.sinkhorn_iterations: got 0"),
        (SINKHORN | {"balance_coefficient": 0.1}, "evens out loads by itself"),
        (SINKHORN | {"top_k": 1}, "moe.renormalize.*without gradient"),
        (SINKHORN | {"num_groups": 2}, "1 with router sinkhorn"),
        (SINKHORN | {"score_bias": True}, "use router sigmoid"),
        (CHOICE | {"device_groups": 2, "device_balance_coefficient": 0.1}, "evens out loads"),
        (CHOICE | {"renormalize": True}, "whose weights are the scores as they are"),
        (CHOICE | {"dispatcher": "dropless"}, "or allgather"),
        (CHOICE | {"capacity_factor": 2.0}, "while model.moe.router is 'expert_choice'"),
        (CHOICE | {"drop_policy": "position"}, "while model.moe.router is 'expert_choice'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MoeConfig(**settings)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"moe": MoeConfig(num_experts=4, first_dense=4)}, "leave experts in some of 4 layers"),
        ({"moe": MoeConfig(num_experts=4, ffn_dim=64)}, "set model.ffn_dim in its place"),
        ({"activation_clamp": 5.0}, "while model.activation is 'swiglu'"),
        ({"activation": "clamped_swiglu", "activation_clamp": 0.0}, "GPT-OSS takes 7"),
    ],
)
def test_models_that_experts_or_activations_do_not_fit_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**model)


MODEL = ModelConfig(attention=AttentionConfig(num_heads=8), moe=MoeConfig(num_experts=8))


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (ModelConfig(), {"expert": 2}, "mesh.expert: got 2, expected 1 for a dense model"),
        (MODEL, {"expert": 3}, "model.embed_dim: got 256"),
        (MODEL, {"expert": 4, "tensor": 4}, r"model.moe.num_experts: got 8.*tensor \(16\)"),
        (MODEL, {"expert": 8, "data": 4}, "train.batch_size: got 16"),
    ],
)
def test_meshes_that_experts_do_not_fit_are_refused_before_any_device(model, mesh, message):
    with pytest.raises(ValueError, match=message):
        validate(Config(model=model, mesh=MeshConfig(**mesh)))


@pytest.mark.parametrize(("dispatcher", "times"), [("dropless", 8), ("allgather", 4)])
def test_expanded_products_on_gpu_are_refused_unless_allowed(dispatcher, times):
    def config(allowed):
        moe = MoeConfig(num_experts=8, dispatcher=dispatcher, allow_expanded_products=allowed)
        return Config(model=ModelConfig(moe=moe), train=TrainConfig())

    with pytest.raises(
        ValueError, match=rf"expands the expert products to up to {times} times"
    ) as caught:
        resolve_backends(config(False), "gpu")
    assert "set model.moe.dispatcher to capacity" in str(caught.value)
    resolve_backends(config(False), "cpu")
    resolve_backends(config(True), "gpu")
