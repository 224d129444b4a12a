"""What a server tells Prometheus: vLLM's names where it has them, so that dashboards fit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

# Where the processes of a server have their counts together; prometheus-client reads it too.
SHARED = "PROMETHEUS_MULTIPROC_DIR"

_FIRST: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80, 160),
)
_BETWEEN: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 10),
)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))

_GAUGES = {  # of the engine's statistics
    "vllm:num_requests_running": ("running", "Requests that have a row of a step."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait for one."),
    "tbo:shapes": ("shapes", "Shapes that steps can have."),
    "tbo:shapes_compiled": ("shapes_compiled", "Of those, the ones that are compiled."),
}
_COUNTERS = {
    "vllm:num_preemptions": ("preemptions", "Requests that lost their pages to others."),
    "vllm:prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "vllm:generation_tokens": ("generated_tokens", "Generated tokens."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Tokens looked for in the prefix cache."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Tokens found in the prefix cache."),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Draft tokens verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
    "tbo:evicted_pages": ("evictions", "Kept pages whose place was needed."),
    "tbo:step_seconds": ("step_seconds", "Seconds in steps of the engine."),
    "tbo:device_wait_seconds": ("wait_seconds", "Of those, spent waiting for the device."),
    "tbo:steps_ahead": ("steps_ahead", "Steps dispatched before the last one's tokens were read."),
    "tbo:link_bytes": ("link_bytes", "Bytes that a device sent to others."),
}


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        model: the name of the model, a label of each.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._statistics: Mapping[str, Any] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return whole.labels(model)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Until the first token of a stream.", _FIRST
        )
        self.between_tokens = histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of a stream.", _BETWEEN
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Of a request.", _WHOLE)
        self.prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generated = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )
        self._success = Counter(
            "vllm:request_success",
            "Completions that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._answers = Counter(
            "tbo:http_responses",
            "Answers, by path and status.",
            ["path", "status"],
            registry=self.registry,
        )

    def finished(self, reason: str) -> None:
        """Count a completion that ended."""
        self._success.labels(self._model, reason).inc()

    def answered(self, path: str, status: int) -> None:
        """Count an answer; `path` is one of the server's own, so that there are few."""
        self._answers.labels(path, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """What the engine told last, for the registry."""
        told, labels, model = self._statistics, ["model_name"], [self._model]
        for name, (key, text) in _GAUGES.items():
            if key in told:
                gauge = GaugeMetricFamily(name, text, labels=labels)
                gauge.add_metric(model, told[key])
                yield gauge
        if pages := told.get("pages"):
            gauge = GaugeMetricFamily(
                "vllm:kv_cache_usage_perc", "Pages in use, as a part of all.", labels=labels
            )
            gauge.add_metric(model, cache_usage(told) if pages else 0.0)
            yield gauge
        for name, (key, text) in _COUNTERS.items():
            if key in told:
                counter = CounterMetricFamily(name, text, labels=labels)
                counter.add_metric(model, told[key])
                yield counter
        if "steps" in told:
            steps = CounterMetricFamily(
                "tbo:steps", "Steps, by how they ran.", labels=[*labels, "strategy"]
            )
            split, chunks = told["steps_split"], told["steps_in_chunks"]
            steps.add_metric([*model, "split"], split)
            steps.add_metric([*model, "expert_chunks"], chunks)
            steps.add_metric([*model, "whole"], told["steps"] - split - chunks)
            yield steps

    def page(self, statistics: Mapping[str, Any]) -> bytes:
        """The text for Prometheus, with these statistics of the engine."""
        self._statistics = statistics
        if SHARED not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        together.register(self)
        return generate_latest(together)


def cache_usage(statistics: Mapping[str, Any]) -> float:
    """Pages in use as a part of all, from 0 to 1."""
    pages = statistics.get("pages") or 0
    return (pages - statistics.get("free_pages", 0)) / pages if pages else 0.0


class Watch:
    """The times of one request, booked as it goes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}  # when each completion had its last token

    def tokens(self, choice: int, count: int) -> None:
        """Some tokens of a completion came."""
        now = time.perf_counter()
        last = self._last.get(choice)
        if last is None:
            if not self._last:
                self._metrics.first_token.observe(now - self._start)
        else:
            self._metrics.between_tokens.observe((now - last) / count)
        self._last[choice] = now

    def over(self, prompt_tokens: int, generated: int) -> None:
        """The request ended."""
        self._metrics.whole.observe(time.perf_counter() - self._start)
        self._metrics.prompt.observe(prompt_tokens)
        self._metrics.generated.observe(generated)
