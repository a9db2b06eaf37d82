"""Writes hf_<name>.npz: tiny random Hugging Face models with logits, loss and all gradients.

The goldens are the independent reference of our models and their Hugging Face adapters. They are
made once and committed; tests only read them, so torch and transformers are not needed to test.

    python tests/golden/make_hf_goldens.py [name ...]     # torch CPU, transformers >= 5

Reference: transformers with eager attention, float32, evaluation mode. Every parameter is drawn
from a fixed seed, norms and biases included (a norm weight of one or a bias of zero would hide a
missing multiplication), and rounded to float16 so that the file can store two bytes per value and
still be exact. Frequencies, windows and soft caps are scaled down so that each of them changes the
result at 24 tokens; `describe` prints that it does. A sliding window W means W keys, the query's
own included.

Keys of each file (read with `numpy.load(path)`, no pickle):
    config          JSON string, `config.to_dict()` of the Hugging Face config
    meta            JSON string: name, versions, seed, tied, absent_params (names that the tied
                    model leaves out), param_layout, loss
    input_ids       int32   [B=2, T=24]
    logits          float32 [B, T, V=128]
    loss            float32 [], mean over B*(T-1) of the cross-entropy of token t+1 given t; with
                    multi-token prediction, plus MTP_WEIGHT times the mean over its modules k of
                    the mean over B*(T-1-k) of that of token t+1+k
    param/<name>    float16 (exact in float32), name and layout as Hugging Face has them
                    buffers that a router adds to its scores included
    grad/<name>     float32, d loss / d param, same names and shapes; not of buffers
    balance         float32 [experts' layers], only with experts and a router that transformers
                    gives the logits of: its load-balancing loss, of each layer by itself
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_families import GOLDENS, ROUTER_BIAS, VOCAB, Golden
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
SEED = 20240607
BATCH, SEQ_LEN = 2, 24
MAX_FILE_BYTES = 1_000_000
MTP_WEIGHT = 0.3


def build_model(golden: Golden, overrides: dict[str, Any] | None = None) -> torch.nn.Module:
    """The model in float32, evaluation mode, eager attention, parameters still arbitrary.

    What transformers would load as its modules of multi-token prediction is its part "mtp".
    """
    config = getattr(transformers, golden.config_class)(**{**golden.config, **(overrides or {})})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    if golden.config.get("num_mtp_layers"):
        model.mtp = MtpModel(model, golden.config["num_mtp_layers"])
    return model.eval()


def draw_params(model: torch.nn.Module, norm_center: float) -> dict[str, np.ndarray]:
    """float16 values for every distinct parameter (a tied head appears once, as the embedding)."""
    rng = np.random.default_rng(SEED)
    params = {}
    for name, param in model.named_parameters():
        shape = tuple(param.shape)
        noise = rng.standard_normal(shape)
        is_norm = len(shape) == 1 and name.endswith("weight")
        # 0.2 is 1.6/sqrt(64) for matrices: activations near one, attention far from uniform.
        value = norm_center + 0.3 * noise if is_norm else 0.2 * noise
        params[name] = value.astype(np.float16)
    for name, buffer in router_biases(model).items():
        params[name] = (0.2 * rng.standard_normal(tuple(buffer.shape))).astype(np.float16)
    return params


def router_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that routers add to scores, which transformers leaves at zero."""
    return {name: b for name, b in model.named_buffers() if name.endswith(ROUTER_BIAS)}


def load_params(model: torch.nn.Module, params: dict[str, np.ndarray]) -> None:
    """Copies the drawn values in; every parameter must be given."""
    with torch.no_grad():
        for name, param in [*model.named_parameters(), *router_biases(model).items()]:
            param.copy_(torch.from_numpy(params[name].astype(np.float32)))


def draw_ids() -> torch.Tensor:
    """int64 [B, T] uniform token ids."""
    return torch.from_numpy(np.random.default_rng(SEED + 1).integers(0, VOCAB, (BATCH, SEQ_LEN)))


def forward(model: torch.nn.Module, ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [B, T, V] and the mean next-token cross-entropy, [], in nats."""
    out = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    loss = cross_entropy(out.logits, ids_BT, 1)
    if hasattr(model, "mtp"):
        loss = loss + MTP_WEIGHT * mtp_loss(model, ids_BT, out.hidden_states[-1])
    return out.logits, loss


def cross_entropy(logits_BTV: torch.Tensor, ids_BT: torch.Tensor, places: int) -> torch.Tensor:
    """Mean over the positions that have a token so many places ahead."""
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-places].reshape(-1, VOCAB), ids_BT[:, places:].reshape(-1)
    )


def mtp_loss(model: torch.nn.Module, ids_BT: torch.Tensor, h_BTD: torch.Tensor) -> torch.Tensor:
    """Mean of the losses of the modules, each on the positions that have a target for it."""
    losses = []
    for k, layer in enumerate(model.mtp.layers, start=1):
        # Module k stands at the positions of the tokens it reads, k further than the first one's.
        ids, h_BTD = ids_BT[:, k:], h_BTD[:, : ids_BT.shape[1] - k]
        length = ids.shape[1]
        positions = torch.arange(k, k + length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        h_BTD = layer(
            inputs_embeds=model.get_input_embeddings()(ids),
            previous_hidden_state=h_BTD,
            position_embeddings=model.model.rotary_emb(h_BTD, position_ids=positions),
            attention_mask=mask,
            position_ids=positions,
            cache=None,
        )
        losses.append(cross_entropy(model.lm_head(h_BTD), ids, 1))
    return sum(losses) / len(losses)


def ablation_effects(golden: Golden, params, ids_BT, logits_BTV) -> dict[str, float]:
    """Largest change of a logit per ablation; raises when one has no visible effect."""
    effects = {}
    cases = [(", ".join(overrides), overrides, params) for overrides in golden.ablations]
    for name in golden.zeroed:
        without = {n: v * 0 if n.endswith(name) else v for n, v in params.items()}
        cases.append((name, {}, without))
    for what, overrides, values in cases:
        model = build_model(golden, overrides)
        load_params(model, values)
        with torch.no_grad():
            changed_BTV, _ = forward(model, ids_BT)
        effect = float((changed_BTV - logits_BTV).abs().max())
        # Exact instead of tanh gelu moves them by about 1e-3, everything else by more than 0.1.
        if effect < 1e-4:
            raise ValueError(f"{what} changes the logits by {effect:.1e} only: not exercised")
        effects[what] = effect
    return effects


def balance_losses(model: torch.nn.Module, ids_BT: torch.Tensor) -> dict[str, np.ndarray]:
    """transformers' load-balancing loss of each layer with experts; nothing for other models."""
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "load_balancing_loss_func"):
        return {}
    config = model.config
    with torch.no_grad():
        logits = model(input_ids=ids_BT, use_cache=False, output_router_logits=True).router_logits
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    losses = [
        module.load_balancing_loss_func((layer,), experts, config.num_experts_per_tok)
        for layer in logits
    ]
    return {"balance": np.array([float(x) for x in losses], np.float32)}


def make(name: str) -> None:
    """Writes hf_<name>.npz next to this file. ValueError if it is not a golden to rely on."""
    golden = GOLDENS[name]
    model = build_model(golden)
    params = draw_params(model, golden.norm_center)
    load_params(model, params)
    ids_BT = draw_ids()
    logits_BTV, loss = forward(model, ids_BT)
    loss.backward()
    grads = {n: p.grad.numpy().astype(np.float32) for n, p in model.named_parameters()}
    for param_name, grad in grads.items():
        if not np.isfinite(grad).all() or not np.abs(grad).max() > 0:
            raise ValueError(f"{name}: the gradient of {param_name} is zero or not finite")
    effects = ablation_effects(golden, params, ids_BT, logits_BTV.detach())
    meta = {
        "name": name,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "seed": SEED,
        "tied": bool(model.config.tie_word_embeddings),
        "absent_params": sorted(set(model.state_dict()) - set(params)),
        "param_layout": golden.param_layout,
        "loss": "mean over B*(T-1) of the next-token cross-entropy, nats",
    }
    path = HERE / f"hf_{name}.npz"
    np.savez_compressed(
        path,
        config=np.array(json.dumps(model.config.to_dict(), sort_keys=True)),
        meta=np.array(json.dumps(meta, sort_keys=True)),
        input_ids=ids_BT.numpy().astype(np.int32),
        logits=logits_BTV.detach().numpy(),
        loss=loss.detach().numpy(),
        **balance_losses(model, ids_BT),
        **{f"param/{n}": v for n, v in params.items()},
        **{f"grad/{n}": v for n, v in grads.items()},
    )
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.name}: got {path.stat().st_size} bytes, limit {MAX_FILE_BYTES}")
    describe(path, meta, loss.item(), sum(v.size for v in params.values()), effects)


def describe(path: Path, meta: dict, loss: float, num_params: int, effects: dict) -> None:
    """Prints what was written, and how much each ablation moves the logits."""
    print(f"{path.name}: {path.stat().st_size} bytes, {num_params} params, loss {loss:.6f}")
    print(f"  absent: {meta['absent_params']}")
    for what, effect in effects.items():
        print(f"  without {what}: logits move by {effect:.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for golden_name in sys.argv[1:] or GOLDENS:
        make(golden_name)
