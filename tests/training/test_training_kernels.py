"""A training step through kernels, interpreted on CPU: the gradient of the step by XLA."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tbo_jax.attention.gpu_flash import GpuFlashAttention
from tbo_jax.attention.tpu_flash import TpuFlashAttention
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.moe.gpu_experts_grad import DifferentiableGpuExperts
from tbo_jax.moe.tpu_experts_grad import DifferentiableTpuExperts
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.step.kernels import TrainingKernels, attention_shape, expert_shape
from tbo_jax.training import loss as of_training
from tests.training.test_training import FAST, SPARSE, by_layer, overlap, tokens

KERNELS = {
    "gpu": (GpuFlashAttention, DifferentiableGpuExperts, 64),
    "tpu": (TpuFlashAttention, DifferentiableTpuExperts, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("platform", KERNELS)
def test_gradients_are_those_of_xla(
    platform: str, remat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, experts, size = KERNELS[platform]
    config = dataclasses.replace(
        SPARSE, num_layers=1, hidden_size=size, head_dim=16, expert_intermediate_size=size,
        num_experts=4, rotary=dataclasses.replace(SPARSE.rotary, dim=16),
    )  # fmt: skip

    def gradient() -> dict[object, np.ndarray]:
        model = CausalLM(config, rngs=nnx.Rngs(0))
        loss = of_training.NextTokenLoss(
            model, mesh=make_mesh(2), overlap=overlap(2), balance_weight=0.3, remat=remat
        )
        lowered = jax.jit(loss.value_and_grad).lower(nnx.state(model), tokens())
        return by_layer(lowered.compile(FAST)(nnx.state(model), tokens())[1], 1)

    want = gradient()
    kernels = TrainingKernels(
        attention(attention_shape(config), interpret=True),
        experts(expert_shape(config), interpret=True),
    )
    monkeypatch.setattr(of_training, "choose_training_kernels", lambda *_: kernels)
    got = gradient()
    assert got.keys() == want.keys()
    for path, expected in want.items():
        np.testing.assert_allclose(got[path], expected, rtol=0, atol=1e-5, err_msg=str(path))
