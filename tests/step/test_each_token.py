"""What is made of the logits of all tokens, a block at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.step import forward
from tbo_jax.step.forward import EachToken, _of_each

VOCABULARY = 7
HEAD = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 4, 5, 13, 15])
def test_blocks_give_what_all_tokens_at_once_give(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """And those in which nothing is wanted are not computed."""
    monkeypatch.setattr(forward, "TOKENS_AT_A_TIME", 5)
    rng = np.random.default_rng(tokens)
    hidden = rng.normal(size=(tokens, 3)).astype(np.float32)
    targets = rng.integers(0, VOCABULARY, tokens).astype(np.int32)
    targets[5:10] = -1
    blocks: list[int] = []

    def logits(rows: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: blocks.append(len(rows)), rows)
        return rows @ HEAD

    def of_block(logits: jax.Array, targets: jax.Array) -> jax.Array:
        assert logits.shape == (min(5, tokens), VOCABULARY)
        chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)
        return jnp.concatenate([chosen, logits.max(1, keepdims=True)], axis=1)

    model: Any = SimpleNamespace(logits=logits)
    run = jax.jit(lambda hidden, targets: _of_each(model, hidden, EachToken(targets, of_block)))
    found = np.asarray(run(hidden, targets))
    jax.effects_barrier()
    exact = hidden @ HEAD
    expected = np.stack([exact[np.arange(tokens), np.maximum(targets, 0)], exact.max(1)], axis=1)
    wanted = targets >= 0
    np.testing.assert_allclose(found[wanted], expected[wanted], rtol=1e-5)
    assert found.shape == (tokens, 2)
    assert len(blocks) == -(-tokens // 5) - (tokens > 5)
