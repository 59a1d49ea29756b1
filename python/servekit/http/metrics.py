"""What `/metrics` tells: one answer for the whole server, read from the state page by whichever worker is asked.

`METRICS` is the whole list; `docs/metrics.md` and the dashboard beside it name the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from servekit import __version__
from servekit.runtime.phase import Phase

if TYPE_CHECKING:
    from servekit._core import StatePage

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Described(NamedTuple):
    """One metric.

    Attributes:
        name: without the `_total` that counters get.
        kind: counter, gauge or histogram.
        help: what it counts, in one line.
        labels: names of its labels. No value of any comes from a client.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    Described("servekit_prompt_tokens", COUNTER, "Tokens of prompts that a rank has begun to answer", ("rank",)),
    Described("servekit_cached_prompt_tokens", COUNTER, "Those of them that came from its prefix cache", ("rank",)),
    Described("servekit_generation_tokens", COUNTER, "Tokens generated", ("rank",)),
    Described("servekit_requests_dispatched", COUNTER, "Requests sent to a rank", ("rank",)),
    Described("servekit_num_requests_running", GAUGE, "Requests in a rank's batch", ("rank",)),
    Described("servekit_num_requests_waiting", GAUGE, "Requests that a rank has and does not run yet", ("rank",)),
    Described("servekit_num_requests_without_rank", GAUGE, "Requests that wait for a rank to become active"),
    Described("servekit_rank_active", GAUGE, "1 while a rank takes requests", ("rank",)),
    Described("servekit_kv_tokens_held", GAUGE, "Tokens in a rank's KV pool that running requests hold", ("rank",)),
    Described("servekit_kv_tokens_capacity", GAUGE, "Tokens that a rank's KV pool has room for", ("rank",)),
    Described("servekit_prompt_tokens_pending", GAUGE, "Prompt tokens that a rank has to compute", ("rank",)),
    Described("servekit_time_to_first_token_seconds", HISTOGRAM, "From a stream's admission to its first piece"),
    Described("servekit_inter_token_seconds", HISTOGRAM, "From one piece of a stream to the next"),
    Described("servekit_request_seconds", HISTOGRAM, "From a request's admission to its end"),
    Described("servekit_queue_seconds", HISTOGRAM, "From a request's arrival at its rank to its first step"),
    Described("servekit_requests_started", COUNTER, "Choices that workers sent to ranks"),
    Described("servekit_requests_finished", COUNTER, "Choices that ended, by how", ("reason",)),
    Described("servekit_requests_refused", COUNTER, "Requests refused with 503, by whom", ("by",)),
    Described("servekit_requests_unauthorized", COUNTER, "Requests without the right key"),
    Described("servekit_requests_open", GAUGE, "Requests that hold a place in the server", ("worker",)),
    Described("servekit_connections_cut", COUNTER, "Connections that the server closed, by why", ("reason",)),
    Described("servekit_frames_dropped", COUNTER, "Messages between processes that went nowhere", ("process",)),
    Described("servekit_frames_fenced", COUNTER, "Messages of a dead process's life, or for one", ("process",)),
    Described("servekit_frames_gaps", COUNTER, "Times that messages to a worker were lost"),
    Described("servekit_tokenizer_cache_lookups", COUNTER, "Texts looked up in the cache of tokenized prefixes"),
    Described("servekit_tokenizer_cache_hits", COUNTER, "Those of which it knew a part"),
    Described("servekit_tokenizer_cache_tokens", COUNTER, "Tokens of the texts looked up"),
    Described("servekit_tokenizer_cache_hit_tokens", COUNTER, "Those of them that it knew"),
    Described("servekit_tokenizer_cache_bytes", GAUGE, "Bytes that the caches of all workers hold"),
    Described("servekit_process_cpu_seconds", COUNTER, "Processor time of a living process", ("process",)),
    Described("servekit_process_resident_bytes", GAUGE, "Memory of a living process", ("process",)),
    Described("servekit_ready", GAUGE, "1 while the server takes requests"),
    Described("servekit_build_info", GAUGE, "Always 1; which build this is", ("version",)),
)

_HISTOGRAMS = {
    "servekit_time_to_first_token_seconds": "first_token",
    "servekit_inter_token_seconds": "gap",
    "servekit_request_seconds": "end_to_end",
    "servekit_queue_seconds": "queue",
}
_FAMILIES: dict[str, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and the value."""


class ServerMetrics:
    """A collector of Prometheus' client library.

    Args:
        page: the state page.
        main_pid: process id of main.
        silence_s: a control process that was not heard for that long is dead.
    """

    def __init__(self, page: StatePage, main_pid: int, silence_s: float) -> None:
        self._page = page
        self._main_pid = main_pid
        self._silence_s = silence_s

    def collect(self) -> Iterator[Metric]:
        """All metrics now."""
        samples = self._samples()
        histograms = self._page.histograms()
        for metric in METRICS:
            if metric.kind == HISTOGRAM:
                family = HistogramMetricFamily(metric.name, metric.help)
                family.add_metric([], *_buckets(*histograms[_HISTOGRAMS[metric.name]]))
                yield family
                continue
            plain = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
            for labels, value in samples[metric.name]:
                plain.add_metric(labels, value)
            yield plain

    def _samples(self) -> dict[str, list[Sample]]:
        state = self._page.snapshot()
        control, ranks, workers = state["control"], state["ranks"], state["workers"]
        # Loads are what control last heard, so they die with it as well as with the rank.
        heard = self._page.control_age() <= self._silence_s
        loads = [(_label(i), rank) for i, rank in enumerate(ranks) if heard and rank["active"]]
        living = [(_label(i), worker) for i, worker in enumerate(workers) if worker["pid"]]

        def total(field: str) -> float:
            return float(sum(worker[field] for worker in workers))

        def each(field: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> list[Sample]:
            return [((label,), float(row[field])) for label, row in rows]

        every = [(_label(i), rank) for i, rank in enumerate(ranks)]
        processes = list(_processes(self._main_pid, state))
        return {
            "servekit_prompt_tokens": each("prompt_tokens", every),
            "servekit_cached_prompt_tokens": each("cached_tokens", every),
            "servekit_generation_tokens": each("generation_tokens", every),
            "servekit_requests_dispatched": each("dispatched", every),
            "servekit_num_requests_running": each("running", loads),
            "servekit_num_requests_waiting": each("waiting", loads),
            "servekit_num_requests_without_rank": [((), float(control["waiting"]))] if heard else [],
            "servekit_rank_active": [((label,), float(heard and rank["active"])) for label, rank in every],
            "servekit_kv_tokens_held": each("held_tokens", loads),
            "servekit_kv_tokens_capacity": each("pool_tokens", loads),
            "servekit_prompt_tokens_pending": each("pending_tokens", loads),
            "servekit_requests_started": [((), total("requests"))],
            "servekit_requests_finished": [
                (("stop",), total("stopped")),
                (("length",), total("exhausted")),
                (("abort",), total("aborted")),
                (("error",), total("failed")),
            ],
            "servekit_requests_refused": [
                (("worker",), total("refused")),
                (("control",), float(control["refused"])),
            ],
            "servekit_requests_unauthorized": [((), total("unauthorized"))],
            "servekit_requests_open": each("open_streams", living),
            "servekit_connections_cut": [
                (("slow_sender",), total("slow_senders")),
                (("slow_reader",), total("slow_readers")),
                (("crowded",), total("crowded")),
            ],
            "servekit_frames_dropped": [(("control",), float(control["dropped"])), (("http",), total("dropped"))],
            "servekit_frames_fenced": [(("control",), float(control["fenced"])), (("http",), total("fenced"))],
            "servekit_frames_gaps": [((), total("gaps"))],
            "servekit_tokenizer_cache_lookups": [((), total("cache_lookups"))],
            "servekit_tokenizer_cache_hits": [((), total("cache_hits"))],
            "servekit_tokenizer_cache_tokens": [((), total("cache_tokens"))],
            "servekit_tokenizer_cache_hit_tokens": [((), total("cache_hit_tokens"))],
            "servekit_tokenizer_cache_bytes": [((), total("cache_bytes"))],
            "servekit_process_cpu_seconds": [((title,), cpu) for title, cpu, _ in processes],
            "servekit_process_resident_bytes": [((title,), float(resident)) for title, _, resident in processes],
            "servekit_ready": [((), float(heard and state["phase"] == Phase.READY))],
            "servekit_build_info": [((__version__,), 1.0)],
        }


def registry_of(page: StatePage, main_pid: int, silence_s: float) -> CollectorRegistry:
    """A registry with servekit's metrics alone; see `ServerMetrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerMetrics(page, main_pid, silence_s))
    return registry


def _label(index: int) -> str:
    return str(index)


def _buckets(bounds: list[float], counts: list[int], total: float) -> tuple[list[tuple[str, float]], float]:
    """Counts of buckets as Prometheus wants them, each with those below it; and the sum."""
    buckets, so_far = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets, total


def _processes(main_pid: int, state: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Title, processor seconds and resident bytes of every process that lives."""
    named = [("main", main_pid), ("control", state["control"]["pid"])]
    named += [(f"http[{i}]", worker["pid"]) for i, worker in enumerate(state["workers"])]
    named += [(f"scheduler[dp={i}]", rank["pid"]) for i, rank in enumerate(state["ranks"])]
    for title, pid in named:
        if pid and (used := _used(pid)) is not None:
            yield title, *used


def _used(pid: int) -> tuple[float, int] | None:
    """Processor seconds and resident bytes of a process; None where the system does not tell, or it is gone."""
    try:
        # The name in brackets may hold anything, so fields count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None
