"""Training in quantised formats beside bf16: the same model, text and seeds.

The recipe tiny_gpt.py, narrower, is trained once per precision and seed. Prints the held-out loss
of each and how far it is from bf16's with the same seed, and draws the curves. A run that is there
already is not repeated, and an interrupted one goes on where it was saved.

    python benchmarks/precision_curves.py
    python benchmarks/precision_curves.py --precisions bf16 fp8 --seeds 0 --steps 2000 \
        --batch-size 4 --directory runs/precision_long --picture docs/images/precision_long.svg

About 70 minutes of one core, and 15 of the second, longer one.
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mtjax.config import Config
from mtjax.config.precision import QUANTIZED
from mtjax.operation.metrics import METRICS_FILE, read_metrics
from mtjax.recipes import load_recipe

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/precision_curves.svg"
BASE = "bf16"
EMBED, FFN, EVALUATIONS, POINTS = 128, 384, 6, 30
COLORS = ("#2a78d6", "#c2410c", "#15803d", "#7c3aed", "#888888", "#be185d", "#0e7490")

Curve = dict[int, float]
"""Loss at each step."""


def make_config(args: argparse.Namespace, precision: str, seed: int) -> Config:
    """The recipe, a quarter of its products, without sample."""
    recipe, _ = load_recipe("tiny_gpt")
    train = dataclasses.replace(
        recipe.train,
        steps=args.steps,
        batch_size=args.batch_size,
        seed=seed,
        eval_every=max(1, args.steps // EVALUATIONS),
        sample_tokens=0,
        sample_prompt="",
    )
    metrics = dataclasses.replace(
        recipe.run.metrics,
        every_steps=max(1, args.steps // POINTS),
        tensorboard=False,
        plot=False,
        progress="off",
    )
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, embed_dim=EMBED, ffn_dim=FFN),
        train=train,
        precision=precision,
        checkpoint=dataclasses.replace(recipe.checkpoint, every_steps=100, keep=1),
        run=dataclasses.replace(
            recipe.run, directory=str(args.directory / f"{precision}-seed{seed}"), metrics=metrics
        ),
    )


def run(config: Config) -> dict[str, Curve]:
    """Train, unless that is done; "train" and "eval" losses."""
    from mtjax.training.loop import train

    train(config)
    records = read_metrics(Path(config.run.directory) / METRICS_FILE)
    return {
        name: {int(r["step"]): r[key] for r in records if key in r}
        for name, key in (("train", "train/loss"), ("eval", "eval/loss"))
    }


def gaps(losses: dict[tuple[str, int], Curve], precision: str, seeds: list[int], step: int):
    """Relative difference to bf16 with the same seed, in %, of each seed."""
    pairs = ((losses[precision, seed][step], losses[BASE, seed][step]) for seed in seeds)
    return [100 * (ours / theirs - 1) for ours, theirs in pairs]


def print_table(losses: dict[tuple[str, int], Curve], args: argparse.Namespace) -> None:
    """Held-out loss after the last step."""
    print(f"| precision | held-out loss, mean of {len(args.seeds)} | beside bf16 | of each seed |")
    print("|---|---|---|---|")
    for precision in args.precisions:
        mean = statistics.mean(losses[precision, seed][args.steps] for seed in args.seeds)
        each = gaps(losses, precision, args.seeds, args.steps)
        per_seed = ", ".join(f"{gap:+.2f} %" for gap in each)
        print(f"| `{precision}` | {mean:.4f} | {statistics.mean(each):+.2f} % | {per_seed} |")


def draw(curves: dict[tuple[str, int], dict[str, Curve]], args: argparse.Namespace) -> None:
    """Left the training losses of the first seed; right the held-out loss beside bf16's."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mtjax"})
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)
    seed = args.seeds[0]
    held_out = {key: both["eval"] for key, both in curves.items()}
    base = curves[BASE, seed]["train"]
    left.plot(list(base), list(base.values()), color="#111111", linewidth=2.4, label=BASE)
    right.axhline(0, color="#111111", linewidth=1)
    for color, precision in zip(COLORS, (p for p in args.precisions if p != BASE), strict=False):
        curve = curves[precision, seed]["train"]
        left.plot(list(curve), list(curve.values()), color=color, linewidth=0.9, label=precision)
        steps = list(held_out[precision, seed])
        each = [gaps(held_out, precision, args.seeds, step) for step in steps]
        means = [statistics.mean(values) for values in each]
        right.plot(steps, means, color=color, marker="o", markersize=3, label=precision)
        if len(args.seeds) > 1:
            low, high = [min(values) for values in each], [max(values) for values in each]
            right.fill_between(steps, low, high, color=color, alpha=0.1, linewidth=0)
    left.set_ylabel(f"training loss, seed {seed} (nats per byte)")
    right.set_ylabel("held-out loss beside bf16 (%)")
    right.set_yscale("symlog", linthresh=1, linscale=2)
    limits = right.get_ylim()
    right.set_yticks([t for t in (-1, -0.5, 0, 0.5, 1, 2, 5, 10) if limits[0] <= t <= limits[1]])
    right.yaxis.set_major_formatter("{x:g}")
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, metadata={"Date": None})
    print(f"picture: {args.picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="+", default=[BASE, *QUANTIZED])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--directory", type=Path, default=Path("runs/precision_curves"))
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    args.precisions = [BASE, *(p for p in args.precisions if p != BASE)]
    curves = {
        (precision, seed): run(make_config(args, precision, seed))
        for seed in args.seeds
        for precision in args.precisions
    }
    print_table({key: both["eval"] for key, both in curves.items()}, args)
    draw(curves, args)


if __name__ == "__main__":
    main()
