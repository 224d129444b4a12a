"""Train a small Qwen3-MoE language model on public-domain English, and write it as a checkpoint.

    python examples/train.py --out models-out/kjv            # King James Version, from Debian
    python examples/train.py --out DIR --source BOOK.txt     # your own text
    USE_TBO=1 python examples/train.py --out DIR --devices 4

The layers are the ones that decode: `tbo_jax.training` runs the same stages, with dense attention
in place of the paged cache. With USE_TBO=1 each device cuts its sequences into two micro-batches.
Interrupt it at will: the same command resumes from the last saved step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import tyro
from corpus import CorpusError, batches, default_cache_dir, encode_corpus, load_corpus
from corpus import train_tokenizer as make_tokenizer
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.numpy import load_file, save_file

from tbo_jax import OverlapConfig
from tbo_jax.checkpoint.save import save_model
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.models import find_architecture
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.training.loss import NextTokenLoss
from tbo_jax.training.train_step import init_train_state, make_train_step

END_OF_TEXT_ID = 0  # of the tokenizer that `corpus.py` trains


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a small mixture-of-experts language model."""

    out: Path
    """Folder to write: the checkpoint, and the state to resume from in OUT/state."""
    source: str | None = None
    """Text file or folder of text; default: the King James Version from Debian's packages."""
    steps: int = 3000
    """Optimiser steps."""
    batch: int = 16
    """Sequences a step."""
    length: int = 256
    """Tokens a sequence."""
    learning_rate: float = 3e-3
    """Peak, reached after 5 % of the steps, falling to a tenth of it along a cosine."""
    weight_decay: float = 0.1
    """Of matrices; norms have none."""
    balance: float = 0.01
    """Weight of the routers' load-balancing loss."""
    vocab_size: int = 2048
    """Entries of the tokenizer."""
    hidden: int = 256
    """Width of the residual stream."""
    layers: int = 4
    """Decoder layers."""
    experts: int = 8
    """Experts a layer."""
    active: int = 2
    """Experts a token."""
    expert_width: int = 128
    """Inner width of an expert."""
    save_every: int = 250
    """Steps between saves and validations."""
    seed: int = 0
    """Of the weights and the order of the data."""
    devices: int | None = None
    """On CPU that many devices are made (default 1); on GPU and TPU the first N (default all)."""
    remat: bool = False
    """Compute the layers anew in the backward pass: less memory, more compute."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress bar."""


def hf_config(args: Arguments, eos_token_id: int) -> dict[str, Any]:
    """The config.json of the model."""
    head_dim = 64
    heads = max(2, args.hidden // head_dim)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.expert_width,
        "moe_intermediate_size": args.expert_width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "num_experts": args.experts,
        "num_experts_per_tok": args.active,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "eos_token_id": eos_token_id,
    }


def make_optimizer(args: Arguments) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping by the global norm."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        args.learning_rate,
        max(1, args.steps // 20),
        max(2, args.steps),
        args.learning_rate / 10,
    )
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=args.weight_decay, mask=matrices),
    )


def save_state(path: Path, state: Any, step: int) -> None:
    """Weights and optimiser state, written whole or not at all."""
    leaves = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    temporary = path.with_suffix(".tmp")
    save_file(leaves, temporary, {"step": str(step)})
    os.replace(temporary, path)


def restore_state(path: Path, like: Any) -> Any:
    """The state that `save_state` wrote, in the structure of `like`."""
    leaves, structure = jax.tree.flatten(like)
    saved = load_file(path)
    values = [saved[key] for key in sorted(saved)]
    if [v.shape for v in values] != [leaf.shape for leaf in leaves]:
        raise SystemExit(f"{path}: saved with another model shape; use another --out")
    placed = [jax.device_put(v, leaf.sharding) for v, leaf in zip(values, leaves, strict=True)]
    return jax.tree.unflatten(structure, placed)


def main(args: Arguments) -> None:
    for name, value in {"--steps": args.steps, "--save-every": args.save_every}.items():
        if value < 1:
            raise SystemExit(f"train.py: {name} must be at least 1, got {value}")
    console = Console(stderr=True, quiet=args.quiet)
    if args.devices is not None and args.devices >= 1:
        with contextlib.suppress(RuntimeError):  # in use already: the devices are what they are
            jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = make_mesh(args.devices)
    config = hf_config(args, END_OF_TEXT_ID)
    architecture = find_architecture(config["model_type"])
    model_config = architecture.parse_config(HfConfig(config, "train.py"), jnp.float32)
    model = CausalLM(model_config, rngs=nnx.Rngs(args.seed))
    graph, weights = nnx.split(model)
    loss = NextTokenLoss(
        model,
        mesh=mesh,
        overlap=OverlapConfig.from_env(),
        balance_weight=args.balance,
        remat=args.remat,
    )
    micro_batches = loss.micro_batches(args.batch, args.length)
    state_dir = args.out / "state"
    state_dir.mkdir(parents=True, exist_ok=True)
    documents = load_corpus(args.source, default_cache_dir())
    tokenizer = make_tokenizer(documents, args.vocab_size, args.out)
    training, validation = encode_corpus(documents, tokenizer, seed=args.seed)
    console.print(f"{len(documents)} documents, {training.size:,} training tokens")
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    console.print(
        f"{count:,} parameters on {mesh.size} {jax.devices()[0].platform} device(s), "
        f"{micro_batches} micro-batch(es)"
    )
    optimizer = make_optimizer(args)
    state = init_train_state(model, optimizer, loss)
    train_step, validate = make_train_step(loss, optimizer), jax.jit(loss)

    saved = state_dir / "state.safetensors"
    if saved.exists():
        state = restore_state(saved, state)
        console.print(f"resuming after step {int(state.step)}")
    start = int(state.step)
    data = batches(training, args.batch, args.length, args.seed, start)
    log = state_dir / "log.jsonl"
    best = [np.asarray(b) for b in _take(batches(validation, args.batch, args.length, 1), 4)]

    count_column = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn("{task.description}"), BarColumn(), count_column, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=args.quiet) as bar:
        task = bar.add_task("compiling", total=args.steps, completed=start)
        clock, losses = time.perf_counter(), []
        for step in range(start, args.steps):
            state, metrics = train_step(state, next(data))
            losses.append(metrics["cross_entropy"])
            if (step + 1) % 10 == 0 or step + 1 == args.steps:
                mean = float(np.mean(jax.device_get(losses)))  # waits for the steps
                seconds = time.perf_counter() - clock
                speed = len(losses) * args.batch * args.length / seconds
                text = f"loss {mean:.3f} {speed:,.0f} tok/s"
                bar.update(task, completed=step + 1, description=text)
                row = {"step": step + 1, "loss": mean, "tokens_per_second": speed}
                clock, losses = time.perf_counter(), []
                if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                    found = [validate(state.weights, b)["cross_entropy"] for b in best]
                    row["validation_loss"] = float(np.mean(found))
                    console.print(f"step {step + 1}: validation loss {row['validation_loss']:.3f}")
                    save_state(saved, state, step + 1)
                    clock = time.perf_counter()
                with log.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
    save_model(nnx.merge(graph, state.weights), config, args.out, ml_dtypes.bfloat16)
    generation = {"eos_token_id": config["eos_token_id"], "do_sample": False}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    console.print(f"wrote {args.out}")


def _take(items: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    for _ in range(count):
        yield next(items)


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments, description=__doc__))
    except (CorpusError, ValueError) as error:
        sys.exit(f"train.py: {error}")
