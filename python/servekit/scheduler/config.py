"""The sizes of a scheduler and how it chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """Sizes of a scheduler.

    Attributes:
        max_running: most requests in a batch.
        max_waiting: most requests that wait for it.
        max_prefill_tokens: most prompt tokens in a step.
        chunked_prefill_size: most tokens of one prompt in a step.
        page: tokens in a KV page.
        pages: pages in the pool.
        max_model_len: context in tokens.
        vocab_size, end_ids, seed: see `request.Limits`.
        policy: who of the waiting is next, one of `SCHEDULE_POLICIES`.
        prefix_cache: keep computed prefixes, and share them.
        flights: steps that may be in flight, each with other requests.
        max_rows: most requests in one of them; None leaves it to `max_running`.
    """

    max_running: int
    max_waiting: int
    max_prefill_tokens: int
    chunked_prefill_size: int
    page: int
    pages: int
    max_model_len: int
    vocab_size: int
    end_ids: tuple[int, ...]
    seed: int = 0
    policy: str = "fcfs"
    prefix_cache: bool = True
    flights: int = 1
    max_rows: int | None = None
