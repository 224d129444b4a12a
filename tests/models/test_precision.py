"""Float32 models multiply in float32 on every platform: what XLA is asked for, product by product."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tbo_jax import Bucket, ModelRunner
from tbo_jax.checkpoint.load import load_model
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.training.loss import NextTokenLoss
from tests.golden_cases import Golden
from tests.models.parity import CACHE

PRODUCT = re.compile(r"stablehlo\.dot_general.*")


def products(text: str) -> list[str]:
    found = PRODUCT.findall(text)
    assert len(found) > 5
    return found


def is_exact(product: str) -> bool:
    return "precision = [HIGHEST, HIGHEST]" in product


# Grouped-query attention with experts of XLA, and latent attention.
@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_a_step(name, dtype):
    mesh = make_mesh(1)
    model = load_model(Golden(name).folder, mesh=mesh, dtype=dtype)
    runner = ModelRunner(model, CACHE, mesh=mesh)
    with jax.numpy_dtype_promotion("standard"):  # the norm of Flax relies on it in bfloat16
        found = products(runner.lower(Bucket(16, 4)).as_text())
    if dtype == jnp.float32:
        assert all(map(is_exact, found))
    else:  # routing alone
        rounded = [product for product in found if not is_exact(product)]
        assert len(rounded) > 0.8 * len(found)


def test_products_of_a_training_step():
    mesh = make_mesh(1)
    model = load_model(Golden("qwen3_moe").folder, mesh=mesh, dtype=np.float32)
    loss = NextTokenLoss(model, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((2, 5), np.int32)
    text = jax.jit(loss.value_and_grad).lower(nnx.state(model), tokens).as_text()
    assert all(map(is_exact, products(text)))  # of the backward pass too
