"""How large the key/value cache is made.

It takes what the weights leave free, less what a step takes beside it. How much that is, XLA tells
of the compiled step. Compiling takes memory too, as XLA:GPU tries kernels out, so that the cache is
allocated after it (`Dispatcher.compile_all`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.attention.rounded import CacheDtype
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.devices import free_memory
from tbo_jax.engine.dispatch import buckets_of
from tbo_jax.engine.option_rows import OptionRows
from tbo_jax.engine.row_state import SampledSteps, describing_prompts, sampled_rows, with_sampling
from tbo_jax.engine.sampler import compile_sample_again
from tbo_jax.engine.structured.masks import TokenMasks
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.parallel.processes import least
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import CacheConfig

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30  # default size of the key/value caches of all CPU devices together
ACCELERATOR_CACHE_SHARE = 0.9  # of the memory that the weights leave free


def longest_context(config: EngineConfig, decoder: DecoderConfig) -> int:
    """Most tokens of a request that the model, and who asks, want room for.

    Raises:
        ValueError: `max_context` is more than the model was made for.
    """
    most = decoder.max_position_embeddings
    if config.max_context is not None and config.max_context > most:
        raise ValueError(
            f"max_context {config.max_context} is out of range: expected 2 to {most}, what the "
            "model was made for"
        )
    return most if config.max_context is None else config.max_context


def cache_config(
    config: EngineConfig, decoder: DecoderConfig, mesh: Mesh, longest: int
) -> tuple[CacheConfig, int]:
    """The cache of each device of `mesh`, and the longest context that it holds.

    Raises:
        ValueError: no memory for it, no room in it for two tokens, or for `max_context`.
    """
    pages, size = config.num_pages, config.page_size
    if pages is None:
        of_device = decoder.of_device(config.tensor_parallel)
        pages = least(
            default_num_pages(
                of_device, mesh, size, config.max_sequences, longest, config.cache_dtype
            )
        )
    held = (pages - 1) * size
    if held < 2:
        raise ValueError(
            f"num_pages {pages} with page_size {size}: the cache of a device holds {held} token(s) "
            "besides the page for padding, expected 2 or more"
        )
    if config.max_context is not None and longest > held:
        raise ValueError(
            f"max_context {longest} does not fit: the cache of a device holds {held} tokens"
        )
    longest = min(longest, held)
    if config.max_sequences > max(held, EngineConfig.max_sequences):
        raise ValueError(
            f"max_sequences is {config.max_sequences}: expected at most {held}, the tokens that "
            "the cache of a device holds"
        )
    # No step has more tokens than the pages hold; what is sized by it need not be larger.
    most = min(config.max_batched_tokens, max(held, config.max_sequences))
    return CacheConfig(pages, size, -(-longest // size), most, config.cache_dtype), longest


def default_num_pages(
    config: DecoderConfig,
    mesh: Mesh,
    page_size: int,
    max_sequences: int,
    max_context: int,
    cache_dtype: CacheDtype | None = None,
) -> int:
    """Pages of a device for `max_sequences` full contexts, or as many as there is memory for.

    Raises ValueError where there is memory for less than two.
    """
    free = free_memory(mesh)
    platform = mesh.devices.flat[0].platform
    if free is None and platform != "cpu":
        logger.warning(
            "devices of platform %s do not tell how much memory they have: the key/value caches of "
            "all of them take %d MiB together; give num_pages for others",
            platform,
            CPU_CACHE_BYTES >> 20,
        )
    budget = CPU_CACHE_BYTES / mesh.size if free is None else free * ACCELERATOR_CACHE_SHARE
    wanted = max_sequences * -(-max_context // page_size) + 1
    affordable = int(budget // kv_bytes_per_page(config, page_size, cache_dtype))
    if affordable < 2:
        raise ValueError(
            f"no memory for the key/value cache: {budget / 2**20:.0f} MiB hold no 2 pages of "
            f"{page_size} tokens; take fewer tokens a page, or more devices"
        )
    return min(wanted, _steady(affordable))


def pages_that_fit(
    runner: ModelRunner,
    max_sequences: int,
    drafts: int = 0,
    max_logprobs: int | None = None,
    max_prompt_logprobs: int | None = None,
) -> int:
    """Pages of each device that leave room for the largest steps of `runner`, which are compiled.

    As many as the runner's own at most; equal in all processes.

    Args:
        runner: its buffers are not allocated.
        max_sequences: most sequences of one step on one rank.
        drafts: most draft tokens of a sequence.
        max_logprobs, max_prompt_logprobs: as `Dispatcher` takes them.

    Raises:
        ValueError: the largest step leaves no memory for 2 pages.
    """
    cache, free = runner.cache, free_memory(runner.mesh)
    if free is None:
        return cache.num_pages
    taken = bytes_beside_cache(runner, max_sequences, drafts, max_logprobs, max_prompt_logprobs)
    of_device = runner.config.of_device(runner.tensor.size)
    size = kv_bytes_per_page(of_device, cache.page_size, cache.dtype)
    affordable = least(max((free - taken) // size, 0))
    if affordable < 2:
        raise ValueError(
            f"no memory for the key/value cache: {free / 2**20:.0f} MiB are free, and a step of "
            f"{cache.max_tokens} tokens takes {taken / 2**20:.0f} MiB; take a smaller "
            "max_batched_tokens or max_sequences, or more devices"
        )
    return cache.num_pages if affordable >= cache.num_pages else _steady(affordable)


def bytes_beside_cache(
    runner: ModelRunner,
    max_sequences: int,
    drafts: int = 0,
    max_logprobs: int | None = None,
    max_prompt_logprobs: int | None = None,
) -> int:
    """Most bytes of a device that steps take beside weights and cache, of the programs themselves.

    These are the temporary memory and the outputs of the largest step, and as much as the largest
    weight: what XLA:GPU copies when it tries kernels out, if a program is compiled later. Where
    requests may have options, these are also the tables of the options and what their programs
    take. Where log-probabilities of prompts may be asked for, their program of the step counts too.
    """
    _, verify, prefill = buckets_of(
        runner.cache.max_tokens, max_sequences, drafts, runner.deterministic
    )
    options, masks, tables = None, None, 0
    if max_logprobs is not None:
        vocabulary = runner.config.vocab_size
        options = OptionRows(runner.mesh, max_sequences, vocabulary, max_logprobs)
        masks = TokenMasks(runner.mesh, vocabulary)
        tables = options.table_bytes
    taken = [0]
    runner = with_sampling(runner, max_sequences, drafts > 0)
    program = SampledSteps.of(runner, max_sequences, drafts > 0)
    for bucket in (*verify[-1:], *prefill[-1:]):
        beside = []
        if options is not None and masks is not None:
            vocabulary, rows = runner.config.vocab_size, sampled_rows(bucket)
            beside += [*options.compile(rows), masks.compile(rows)]
            beside.append(compile_sample_again(runner.mesh, program, bucket, vocabulary))
        steps = [runner.compile(bucket)]
        if max_prompt_logprobs is not None and not bucket.decode:
            describing = describing_prompts(runner, program, max_prompt_logprobs)
            steps.append(describing.compile(bucket, runner.strategy(bucket)))
        taken += [_bytes_beside([step, *beside]) for step in steps]
    return runner.largest_weight + tables + max(taken)


def _bytes_beside(programs: Sequence[jax.stages.Compiled]) -> int:
    """Temporary memory and outputs of programs that run one after another, as far as XLA tells."""
    analyses = [program.memory_analysis() for program in programs]
    return sum(
        a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes
        for a in analyses
        if a is not None
    )


def _steady(pages: int) -> int:
    """`pages` without its last bits, up to 3 %.

    What is free differs a little from start to start; with another number of pages all programs
    would be compiled anew.
    """
    spare = max(pages.bit_length() - 6, 0)
    return pages >> spare << spare
