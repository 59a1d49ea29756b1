"""Vectors of embedded prompts as they come from the ranks."""

from __future__ import annotations

from servekit.messages.batches import BatchEmbeddingOutput, Tensor


def vectors_of(batch: BatchEmbeddingOutput) -> list[bytes]:
    """The vector of each row as little-endian f32, empty where there is none that can be read."""
    found = batch.embeddings
    n = len(batch.rids)
    if isinstance(found, Tensor):
        size = len(found.data) // n if n else 0
        whole = found.dtype == "f32" and len(found.shape) == 2 and found.shape[0] == n and size == 4 * found.shape[1]
        return [found.data[i * size : (i + 1) * size] if whole else b"" for i in range(n)]
    rows = found or []
    return [row if len(row) % 4 == 0 else b"" for row in rows] + [b""] * (n - len(rows))
