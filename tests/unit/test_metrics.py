"""What `/metrics` makes of the state page, and that the documentation lists just that."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from servekit import _core
from servekit.http.metrics import COUNTER, HISTOGRAM, METRICS, registry_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page() -> Iterator[_core.StatePage]:
    page = _core.StatePage.create(f"servekit-test-{os.getpid()}-{time.monotonic_ns()}", 2, 2)
    yield page
    page.unlink()
    page.close()


def read(page: _core.StatePage, silence_s: float = 5.0) -> dict[tuple[str, frozenset], float]:
    """Samples as Prometheus reads them, by name and labels."""
    text = generate_latest(registry_of(page, os.getpid(), silence_s)).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "no sample comes twice"
    return found


def of(found: dict[tuple[str, frozenset], float], name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def exposed(name: str, kind: str) -> str:
    return name + "_total" if kind == COUNTER else name


def test_tokens_are_those_of_all_workers_by_rank(page: _core.StatePage) -> None:
    page.count_tokens(0, 0, 10, 4, 3)
    page.count_tokens(1, 0, 5, 0, 2)
    page.count_tokens(1, 1, 7, 7, 1)
    page.end_process("http", 1)
    found = read(page)
    for name, by_rank in (
        ("servekit_prompt_tokens_total", (15, 7)),
        ("servekit_cached_prompt_tokens_total", (4, 7)),
        ("servekit_generation_tokens_total", (5, 1)),
    ):
        assert (of(found, name, rank="0"), of(found, name, rank="1")) == by_rank


def test_histograms_are_cumulative_and_of_all_workers(page: _core.StatePage) -> None:
    page.observe(0, "gap", 0.02, 5)
    page.observe(1, "gap", 0.021, 2)
    page.observe(1, "gap", 100.0)
    found = read(page)
    name = "servekit_inter_token_seconds"
    assert of(found, name + "_bucket", le="0.015") == 0
    assert of(found, name + "_bucket", le="0.02") == 5
    assert of(found, name + "_bucket", le="0.025") == 7
    assert of(found, name + "_bucket", le="5.0") == 7
    assert of(found, name + "_bucket", le="+Inf") == of(found, name + "_count") == 8
    assert of(found, name + "_sum") == pytest.approx(0.142 + 100)


def test_who_is_dead_has_no_gauges_and_keeps_its_counters(page: _core.StatePage) -> None:
    page.set_process("http", 0, 1, os.getpid())
    page.set_process("http", 1, 1, 1)
    for worker in (0, 1):
        page.reserve(worker, 3, 30, 100)
        page.worker_add(worker, "stopped", 2)
        page.worker_add(worker, "cache_bytes", 1000)
    page.end_process("http", 1)
    found = read(page)
    assert of(found, "servekit_requests_open", worker="0") == 3
    assert of(found, "servekit_requests_open", worker="1") is None
    assert of(found, "servekit_tokenizer_cache_bytes") == 1000
    assert of(found, "servekit_requests_finished_total", reason="stop") == 4
    assert of(found, "servekit_process_resident_bytes", process="http[0]") > 1 << 20
    assert of(found, "servekit_process_resident_bytes", process="http[1]") is None
    # Nothing was heard of control, so nothing is known of its ranks.
    assert of(found, "servekit_num_requests_running", rank="0") is None
    assert of(found, "servekit_rank_active", rank="0") == 0
    assert of(found, "servekit_ready") == 0


def test_the_list_is_the_endpoint_and_the_documentation(page: _core.StatePage) -> None:
    text = generate_latest(registry_of(page, os.getpid(), 5.0)).decode()
    typed = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    listed = {exposed(metric.name, metric.kind): metric.kind for metric in METRICS}
    assert typed == listed
    assert all(name.startswith("servekit_") for name in listed)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| (.+) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert [tuple(cell.strip() for cell in row) for row in rows] == [
        (exposed(m.name, m.kind), m.kind, ", ".join(f"`{label}`" for label in m.labels), m.help) for m in METRICS
    ]


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    there = {exposed(metric.name, metric.kind) for metric in METRICS}
    there |= {f"{m.name}_{part}" for m in METRICS if m.kind == HISTOGRAM for part in ("bucket", "sum", "count")}
    names = set(re.findall(r"servekit_\w+", asked))
    assert names and names <= there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
