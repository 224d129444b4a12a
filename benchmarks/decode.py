"""Time decoding on this machine, side by side in one run.

    python benchmarks/decode.py --model DIR [--dtype bfloat16] [--gguf FILE] [--repeats 3]

Two loads: one request, and 16 requests of mixed lengths, spread evenly on a logarithmic scale as
real requests roughly are: many short, a few long. Subjects: tbo_jax with USE_TBO=0, the same with
deterministic=True, with USE_TBO=1, and, if they are installed, transformers on the same weights,
greedy, with its key/value cache, as one left-padded batch that ends with its longest request, and
llama.cpp (the package xllamacpp) on a GGUF file of these weights, with continuous batching. All
subjects make the tokens that were asked for (no end-of-sequence stop), and only those count.
Medians over the repeats, the subjects in turn.

On CPU XLA runs collectives in line with compute: USE_TBO=1 shows what splitting costs there, not
what overlap gains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tbo_jax import LLM, OverlapConfig, SamplingParams
from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.host.progress import progress_bar
from tbo_jax.overlap.config import Mode

Load = list[tuple[list[int], int]]  # prompt token ids, tokens to generate


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/decode.py."""

    model: Path
    """Hugging Face folder."""
    repeats: int = 3
    """Counted runs of each subject; medians are reported."""
    requests: int = 16
    """Requests of the second load."""
    new_tokens: int = 64
    """Tokens of the single request; the mixed ones ask for an eighth to four times of it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and compute."""
    transformers: bool = True
    """Compare with transformers, if it is installed."""
    gguf: Path | None = None
    """Compare with llama.cpp on this file, which should hold the same weights in the same dtype."""
    memory: bool = True
    """Also measure peak memory, in a process of its own."""
    json: Path | None = None
    """Write the results there too."""


def make_loads(args: Arguments, vocabulary: int) -> dict[str, Load]:
    """The same loads for all subjects: random token ids, lengths from a fixed seed."""
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return rng.integers(5, vocabulary, length).tolist()

    def spread(low: float, high: float) -> list[int]:
        """One number per request, log-evenly from `low` to `high`, in random order."""
        return rng.permutation(np.geomspace(low, high, args.requests).round().astype(int)).tolist()

    wanted = spread(args.new_tokens / 8, args.new_tokens * 4)
    mixed = [(prompt(n), count) for n, count in zip(spread(4, 256), wanted, strict=True)]
    return {"1 request": [(prompt(16), args.new_tokens)], f"{args.requests} requests": mixed}


def tbo_subject(args: Arguments, mode: Mode, deterministic: bool) -> Callable[[Load], None]:
    """Our engine; compiles now."""
    llm = LLM(
        args.model,
        devices=1,
        dtype=args.dtype,
        overlap=OverlapConfig(mode),
        deterministic=deterministic,
        max_context=1024,
        max_sequences=args.requests,
        prefix_cache=False,  # the loads are repeated
        show_progress=True,
    )

    def run(load: Load) -> None:
        params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for _, count in load]
        completions = llm.generate([tokens for tokens, _ in load], params)
        made = [len(c.token_ids) for c in completions]
        assert made == [count for _, count in load], made

    return run


def transformers_subject(args: Arguments) -> dict[str, Callable[[Load], None]]:
    """Transformers, padded; none if it is not installed."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return {}
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()

    def generate(prompts: Sequence[list[int]], count: int) -> None:
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == width + count

    def padded(load: Load) -> None:
        generate([tokens for tokens, _ in load], max(count for _, count in load))

    return {"transformers, padded batch": padded}


def llama_cpp_subject(args: Arguments) -> dict[str, Callable[[Load], None]]:
    """llama.cpp, all requests of a load at once; none without a file for it.

    Raises:
        SystemExit: a file was given and xllamacpp is not installed.
    """
    if args.gguf is None:
        return {}
    try:
        import xllamacpp
    except ImportError:
        raise SystemExit("--gguf needs the package xllamacpp: pip install xllamacpp") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(args.gguf)
    params.n_parallel = args.requests
    params.n_ctx = args.requests * 1024  # shared out evenly
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    def answer(request: tuple[list[int], int]) -> int:
        tokens, count = request
        body = {"prompt": tokens, "n_predict": count, "temperature": 0, "ignore_eos": True}
        return server.handle_completions(body | {"cache_prompt": False})["usage"][
            "completion_tokens"
        ]

    def together(load: Load) -> None:
        with ThreadPoolExecutor(len(load)) as pool:
            made = list(pool.map(answer, load))
        assert made == [count for _, count in load], made

    return {"llama.cpp": together}


def measure(
    subjects: dict[str, Callable[[Load], None]], loads: dict[str, Load], repeats: int
) -> dict[str, dict[str, float]]:
    """Median tokens per second, by load and subject."""
    rates: dict[str, dict[str, float]] = {}
    total = len(loads) * len(subjects) * (repeats + 1)
    with progress_bar("timing", True) as update:
        done = 0
        for name, load in loads.items():
            seconds: dict[str, list[float]] = {subject: [] for subject in subjects}
            for repeat in range(repeats + 1):
                for subject, run in subjects.items():
                    start = time.perf_counter()
                    run(load)
                    if repeat:  # the first is a warm-up
                        seconds[subject].append(time.perf_counter() - start)
                    done += 1
                    update(done, total)
            tokens = sum(count for _, count in load)
            rates[name] = {s: tokens / statistics.median(t) for s, t in seconds.items()}
    return rates


def measure_memory(args: Arguments) -> dict[str, float]:
    """Peak resident memory of compiling and decoding, against weights and cache; MiB (Linux)."""
    script = f"""
import json
from pathlib import Path
from tbo_jax import LLM, OverlapConfig, SamplingParams
llm = LLM({str(args.model)!r}, devices=1, dtype={args.dtype!r}, overlap=OverlapConfig(),
          max_context=1024, max_sequences={args.requests}, prefix_cache=False,
          compilation_cache=False)
llm.generate([[9] * 100] * {args.requests}, SamplingParams(max_new_tokens=32, ignore_eos=True))
runner = llm.engine.runner
# Not getrusage: its figure starts from what the parent process had.
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0])
print(json.dumps({{
    "peak": peak / 1024,
    "weights": sum(w.nbytes for w in runner._weights) / 2**20,
    "pages": runner.cache.num_pages,
    "page_size": runner.cache.page_size,
}}))
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    found = json.loads(out.stdout.splitlines()[-1])
    from tbo_jax.checkpoint.load import read_config

    config, _ = read_config(args.model, jnp.dtype(args.dtype))
    page = kv_bytes_per_page(config, found.pop("page_size")) / 2**20
    found["cache"] = found.pop("pages") * page
    found["beyond"] = found["peak"] - found["weights"] - found["cache"]
    return found


def machine() -> str:
    """What this ran on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    cores = os.cpu_count()
    return f"{model}, {cores} cores, Python {platform.python_version()}, jax {jax.__version__}"


def main(args: Arguments) -> None:
    console = Console()
    subjects = {
        "tbo_jax, USE_TBO=0": tbo_subject(args, "off", False),
        "tbo_jax, USE_TBO=0, deterministic": tbo_subject(args, "off", True),
        "tbo_jax, USE_TBO=1": tbo_subject(args, "on", False),
    }
    if args.transformers:
        found = transformers_subject(args)
        if not found:
            console.print("transformers is not installed: timing tbo_jax alone")
        subjects |= found
    subjects |= llama_cpp_subject(args)
    config = json.loads((args.model / "config.json").read_text())
    rates = measure(subjects, make_loads(args, config["vocab_size"]), args.repeats)
    result: dict[str, Any] = {"machine": machine(), "tokens_per_second": rates}
    console.print(f"{args.model.name}, {args.dtype}, on {result['machine']}")
    for name, of_load in rates.items():
        base = of_load["tbo_jax, USE_TBO=0"]
        table = Table("subject", "tokens/s", "USE_TBO=0 is faster by", title=name)
        for subject, rate in of_load.items():
            table.add_row(subject, f"{rate:.1f}", f"{base / rate:.2f}x")
        console.print(table)
    if args.memory:
        result["memory_mib"] = measure_memory(args)
        text = ", ".join(f"{key} {value:.0f}" for key, value in result["memory_mib"].items())
        console.print(f"memory, MiB: {text}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
