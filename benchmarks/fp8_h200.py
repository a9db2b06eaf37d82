"""Step time in FP8 beside bf16, of layers shaped as those of Llama 3 8B.

They take turns in one process. The default, 4 layers at 8192 tokens, is meant for one H200 and for
less than 4 minutes.

    python benchmarks/fp8_h200.py
    JAX_PLATFORMS=cpu python benchmarks/fp8_h200.py --layers 1 --seq 32 --rounds 1 --vocab 256
"""

import argparse
import dataclasses

from device_step import compare

from mtjax.config import Config, MeshConfig
from mtjax.config.precision import Precision
from mtjax.recipes import load_recipe


def make_config(args: argparse.Namespace, precision: Precision) -> Config:
    """The recipe llama3_8b with fewer layers, on all devices, one sequence for each."""
    recipe = load_recipe("llama3_8b")[0]
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, num_layers=args.layers, vocab_size=args.vocab),
        mesh=MeshConfig(fsdp=-1),
        data=dataclasses.replace(recipe.data, separate_documents=False),
        train=dataclasses.replace(
            recipe.train, seq_len=args.seq, batch_size=args.batch, microbatches=1
        ),
        precision=precision,
    )


def main() -> int:
    import jax

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=jax.device_count())
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=10, help="steps per variant")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8", "fp8_delayed"])
    args = parser.parse_args()
    compare({name: make_config(args, name) for name in args.precisions}, args.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
