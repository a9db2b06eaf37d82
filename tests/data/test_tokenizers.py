"""Text to ids and back, for each kind of tokenizer."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from mtjax.data.tokenizers import count_target_bytes, make_tokenizer

KINDS = ["bytes", "huggingface", "sentencepiece", "tiktoken"]
SAMPLES = [
    "the truth is in the minds of the families",
    "  two spaces,\n\tlines and tabs\n\n",
    "caf\u00e9, na\u00efve, \u4e2d\u6587, \U0001f600!",
    "1234567890 {}[]()<> don't",
]


@pytest.fixture
def build(request):
    def make(kind, eod_token=""):
        path = "" if kind == "bytes" else request.getfixturevalue(f"{kind}_file")
        return make_tokenizer(kind, path, eod_token)

    return make


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back_from_its_ids(build, kind, text):
    tokenizer = build(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_ids_add_up_to_those_of_the_text(build, kind, text):
    tokenizer = build(kind)
    counts = tokenizer.token_bytes()
    assert int(counts[tokenizer.encode(text)].sum()) == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_document_is_below_the_vocabulary_size_and_stands_for_no_byte(build, kind):
    tokenizer = build(kind)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes()[tokenizer.eod] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_document_has_no_text(build, kind):
    tokenizer = build(kind)
    assert tokenizer.decode([*tokenizer.encode("the end"), tokenizer.eod]) == "the end"


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_a_common_word_takes_fewer_ids_than_bytes(build, kind):
    assert len(build(kind).encode(" the")) == 1


def test_bytes_are_their_values():
    tokenizer = make_tokenizer("bytes")
    assert tokenizer.encode("A\u00e9") == [65, 195, 169]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


# huggingface is left out: that library finds special tokens in any text.
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "tiktoken"])
def test_the_name_of_a_special_token_in_a_text_is_plain_text(build, kind):
    tokenizer = build(kind)
    assert tokenizer.eod not in tokenizer.encode("a <|endoftext|> b </s>")


def test_tiktoken_ids_are_the_ranks_and_the_end_of_a_document_follows(build):
    tokenizer = build("tiktoken")
    assert tokenizer.encode(" the") == [256 + 3]
    assert tokenizer.eod == 256 + 7


def test_a_ranks_file_of_a_published_name_gets_its_end_of_document(tmp_path):
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    assert make_tokenizer("tiktoken", str(path)).eod == 100257


def test_a_changed_ranks_file_is_read_anew(tmp_path):
    path = tmp_path / "own.tiktoken"
    ranks = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
    path.write_text("".join(ranks))
    assert len(make_tokenizer("tiktoken", str(path)).encode("th")) == 2
    path.write_text("".join([*ranks, f"{base64.b64encode(b'th').decode()} 256\n"]))
    assert make_tokenizer("tiktoken", str(path)).encode("th") == [256]


def test_a_damaged_ranks_file_is_refused_by_line(tmp_path):
    path = tmp_path / "own.tiktoken"
    path.write_text("YQ== 0\nnot a rank\n")
    with pytest.raises(ValueError, match=r"own.tiktoken, line 2: not a tiktoken rank"):
        make_tokenizer("tiktoken", str(path))


def test_the_end_of_a_document_can_be_named(build):
    tokenizer = build("sentencepiece", eod_token="<s>")
    assert tokenizer.eod == 1  # <unk> <s> </s>
    assert build("sentencepiece").eod == 2


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_an_unknown_end_of_document_is_refused(build, kind):
    with pytest.raises(ValueError, match="<none>"):
        build(kind, eod_token="<none>")


def test_huggingface_takes_special_tokens_from_the_file_beside(huggingface_file, tmp_path):
    spec = json.loads(Path(huggingface_file).read_text(encoding="utf-8"))
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 400, "content": "<end>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    names = {"eos_token": {"content": "<end>"}, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = make_tokenizer("huggingface", str(tmp_path))
    assert tokenizer.decode([tokenizer.eod]) == ""
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert tokenizer.bos == 0


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_a_missing_file_is_refused_by_name(kind, tmp_path):
    with pytest.raises(ValueError, match="absent"):
        make_tokenizer(kind, str(tmp_path / "absent"))


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_a_file_of_another_kind_is_refused_by_name(kind, tmp_path):
    path = tmp_path / "foreign"
    path.write_bytes(b"\x00\x01 something else")
    with pytest.raises(ValueError, match="foreign"):
        make_tokenizer(kind, str(path))


def test_target_bytes_count_only_labels_with_weight():
    labels, weights = np.array([[65, 256, 66]]), np.array([[1.0, 1.0, 0.0]])
    assert count_target_bytes(labels, weights, make_tokenizer("bytes").token_bytes()) == 1
