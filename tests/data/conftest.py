"""Tiny tokenizers, trained here so that no file needs to be fetched."""

import base64
import io

import pytest

TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune,
must be in want of a wife. However little known the feelings or views of such a man may be on his
first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding
families, that he is considered the rightful property of some one or other of their daughters.
"""
MERGES = [b"th", b"the", b" t", b" the", b"in", b"er", b"is"]


@pytest.fixture(scope="session")
def huggingface_file(tmp_path_factory):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("huggingface") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "tiny.model"
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiktoken") / "tiny.tiktoken"
    write_ranks(path, [bytes([i]) for i in range(256)] + MERGES)
    return str(path)


def write_ranks(path, tokens):
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)]
    path.write_text("".join(lines))
