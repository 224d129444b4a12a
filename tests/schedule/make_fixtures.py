"""Write dumps of the runner's step, compiled for machines that are not there.

    pip install -e '.[cuda12,tpu]'          # compilers only: no GPU, no TPU
    python tests/schedule/make_fixtures.py [FIXTURE ...]

Every fixture is the scheduled HLO of one step of a small mixture of experts, as
`jax.stages.Compiled.as_text` gives it, in fixtures/FIXTURE.hlo.xz. Paths of files are cut down to
those in this repository, or to those from site-packages on; the code of kernels is left out.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import sys
import tempfile
from pathlib import Path

import jax

from tbo_jax.schedule.model_step import StepShape, inspect_model, read_shape
from tbo_jax.schedule.targets import find_target

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).resolve().parents[2]
# Name: target, layers, micro-batches, scanned.
CASES = {
    "gpu_unrolled": ("h100x8", 2, 2, False),
    "gpu_scanned": ("h100x8", 3, 2, True),
    "tpu_scanned": ("v5e:2x4", 3, 2, True),
}
SHAPE = StepShape("decode", tokens=128, context=512)
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "attention_bias": False,
    "vocab_size": 8192,
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}


def main(names: list[str]) -> None:
    # The compilers are asked for by name. JAX itself must not look for a GPU and find none.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no cloud to ask for metadata
    FIXTURES.mkdir(exist_ok=True)
    for name in names or list(CASES):
        text = scrub(compile_step(*CASES[name]))
        path = FIXTURES / f"{name}.hlo.xz"
        path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
        print(f"{path.name}: {len(text)} characters, {path.stat().st_size} bytes", flush=True)


def compile_step(target: str, layers: int, micro_batches: int, scanned: bool) -> str:
    """Scheduled HLO."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        shape = read_shape(str(config), layers)
    report = inspect_model(
        shape, find_target(target), SHAPE, micro_batches=micro_batches, scanned=scanned
    )
    return report.hlo


def scrub(text: str) -> str:
    """Without the folders of the machine that compiled, and without the code of kernels.

    Raises:
        ValueError: another absolute path is left.
    """
    text = text.replace(f'"{ROOT}/', '"')
    text = re.sub(r'"/[^"\s]*/(site-packages/[^"\s]*")', r'"\1', text)
    text = re.sub(r'\bir = "(?:[^"\\]|\\.)*"', 'ir = ""', text)  # it names files, too
    if left := re.search(rf'"/\w[^"\s]*/[^"\s]*"|(?:{ROOT}|{sys.prefix}|{Path.home()})/\S*', text):
        raise ValueError(f"a path of this machine is left: {left[0]}")
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
