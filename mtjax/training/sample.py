"""The text that a run writes at its end."""

import jax
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.config.sampling import SamplingConfig
from mtjax.data.tokenizers import Tokenizer, make_tokenizer
from mtjax.inference.generate import check_lengths, decoding_shardings, generate
from mtjax.operation.progress import printable
from mtjax.parallel.stack import Params
from mtjax.training.state import Setup
from mtjax.training.step import gather_params


def check_sample(config: Config) -> None:
    """Refuse before step 0 a sample that can't be drawn after the last one.

    Raises:
        ValueError: as mtjax.inference.generate.check_lengths.
    """
    train = config.train
    if train.sample_tokens:
        prompt = _tokenizer(config).encode(train.sample_prompt)
        names = ("train.sample_prompt", "train.sample_tokens")
        check_lengths(config.model, prompt, train.sample_tokens, names)


def draw_sample(config: Config, mesh: Mesh, setup: Setup, params: Params) -> str:
    """The sample's prompt and its continuation by `params`, the masters, in the compute dtype."""
    # One token at a time waits for memory, and latent attention reorders products.
    config = config.unquantized
    train, tokenizer = config.train, _tokenizer(config)
    shardings = decoding_shardings(config.model, setup.boxes, mesh)
    gather = jax.jit(lambda p: gather_params(config, setup, mesh, p), out_shardings=shardings)
    with jax.set_mesh(mesh):
        computed = gather(params)
    sampling = SamplingConfig(max_tokens=train.sample_tokens, seed=train.seed % 2**32)
    prompt = tokenizer.encode(train.sample_prompt)
    ids = generate(config.model, computed, mesh, prompt, sampling, tokenizer.eod)
    return printable(train.sample_prompt + tokenizer.decode(ids))


def _tokenizer(config: Config) -> Tokenizer:
    data = config.data
    return make_tokenizer(data.tokenizer, data.tokenizer_path, data.eod_token)
