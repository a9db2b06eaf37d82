"""Makes tests/golden/megatron_data*: what megatron-core 0.16.1 writes, reads and orders.

Needs torch and megatron-core (installed without its dependencies is enough), not mtjax:
    python tests/golden/make_megatron_data.py
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

FOLDER = Path(__file__).parent
EOD = 99
SEED = 1234


def write_corpus(prefix, seed, num_documents, dtype=np.uint16):
    """Random documents of 0 to 39 tokens below EOD and an EOD, some in several sequences."""
    generator = np.random.default_rng(seed)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for _ in range(num_documents):
        length = int(generator.integers(0, 40))
        tokens = np.append(generator.integers(0, EOD, length), EOD)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def write_modes(prefix):
    """A multimodal dataset of int32 with two sequences in one document and an empty document."""
    builder = indexed_dataset.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=np.int32, multimodal=True
    )
    builder.add_item(torch.tensor([70000, 1, 2]), mode=1)
    builder.add_item(torch.tensor([3]), mode=0)
    builder.end_document()
    builder.end_document()
    builder.add_item(torch.tensor([4, 5]), mode=1)
    builder.end_document()
    builder.finalize(f"{prefix}.idx")


def make_config(blend, seq_len, split, **options):
    tokenizer = SimpleNamespace(vocab_size=100, eod=EOD, unique_identifiers={}, pad=None)
    settings = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    } | options
    return gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_len,
        blend=blend,
        split=split,
        tokenizer=tokenizer,
        path_to_cache=tempfile.mkdtemp(),
        **settings,
    )


def build(config, sizes):
    builder = BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, sizes, lambda: True, config)
    return builder.build()


def gpt_goldens(prefix, out):
    """Indices of each split, for one epoch, several, and a short and a long last epoch."""
    for seq_len in (16, 33):
        for num_samples in (None, 5, 61, 130, 151, 170, 400):
            config = make_config(([prefix], None), seq_len, "80,15,5")
            for name, dataset in zip(
                ("train", "valid", "test"), build(config, [num_samples] * 3), strict=True
            ):
                key = f"gpt/{seq_len}/{num_samples}/{name}"
                out[f"{key}/document"] = dataset.document_index
                out[f"{key}/sample"] = dataset.sample_index
                out[f"{key}/shuffle"] = dataset.shuffle_index


def sequence_goldens(prefix, out):
    """The arrays of the first sequences, without and with the boundaries of documents."""
    for name, reset in (("joined", False), ("separate", True)):
        config = make_config(
            ([prefix], None), 16, "80,15,5", reset_position_ids=reset, eod_mask_loss=reset
        )
        dataset = build(config, [40, 40, 40])[0]
        rows = [dataset[i] for i in range(40)]
        for field in ("tokens", "labels", "loss_mask", "position_ids"):
            out[f"rows/{name}/{field}"] = np.stack([row[field].numpy() for row in rows])


def blend_goldens(prefixes, out):
    """The blend's two indices, and its first sequences end to end."""
    for key, weights, size in (
        ("weighted", [0.2, 0.5, 0.3], 100),
        ("uneven", [7.0, 1.0, 1.0], 333),
        ("by_length", None, 60),
        ("exhaustive", None, None),
    ):
        config = make_config((prefixes, weights), 16, "80,15,5")
        dataset = build(config, [size, size, size] if size else [None] * 3)[0]
        out[f"blend/{key}/dataset"] = dataset.dataset_index
        out[f"blend/{key}/sample"] = dataset.dataset_sample_index
        rows = [dataset[i]["tokens"].numpy() for i in range(50)]
        out[f"blend/{key}/tokens"] = np.stack(rows).astype(np.int32)


def helper_goldens(out):
    """The C++ helpers alone, on awkward input: empty documents, ties, the last partial sample."""
    lengths = np.array([5, 0, 7, 1, 0, 12, 3], np.int32)
    order = np.array([2, 1, 0, 3, 6, 4, 5], np.int32)
    for seq_len in (3, 4, 9):
        for drop_last in (True, False):
            out[f"sample_helper/{seq_len}/{drop_last}"] = helpers.build_sample_idx(
                lengths, order, seq_len, 1, int(lengths.sum()), drop_last, True
            )
    for key, weights in (
        ("ties", [0.25] * 4),
        ("tiny", [0.001, 0.999]),
        ("three", [0.1, 0.2, 0.7]),
    ):
        dataset, sample = np.zeros(500, np.int16), np.zeros(500, np.int64)
        helpers.build_blending_indices(dataset, sample, weights, len(weights), 500, False)
        out[f"blend_helper/{key}/dataset"], out[f"blend_helper/{key}/sample"] = dataset, sample


def main():
    # BlendedDataset asks for the rank: a group of one process answers.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    prefixes = [str(FOLDER / f"megatron_data_{name}") for name in "abc"]
    for seed, (prefix, num_documents) in enumerate(zip(prefixes, (120, 37, 64), strict=True)):
        write_corpus(prefix, seed, num_documents, np.int32 if seed == 1 else np.uint16)
    write_modes(str(FOLDER / "megatron_data_modes"))
    out = {}
    gpt_goldens(prefixes[0], out)
    sequence_goldens(prefixes[0], out)
    blend_goldens(prefixes, out)
    helper_goldens(out)
    np.savez_compressed(FOLDER / "megatron_data.npz", **out)


if __name__ == "__main__":
    main()
