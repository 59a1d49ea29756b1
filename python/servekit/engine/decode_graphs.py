"""Steps of one token a row, recorded once for each size and played again.

A small model's step is hundreds of kernels, which a GPU computes faster than a host can start them one by one. CUDA
plays a recorded sequence of them by one call, but always with the same addresses and sizes. So rows and pages are
rounded up to a few sizes; each has buffers of its own, which a step's numbers are copied into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from servekit.engine.attention import Attention
from servekit.engine.device import upload
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Ints, Plan

_MAX_ROWS = 256
_MAX_BYTES = 256 << 20
"""Keys and values that one layer of a step gathers at most; larger steps are not recorded, their kernels take long."""

Model = Callable[[torch.Tensor, torch.Tensor, Attention], torch.Tensor]
"""Makes [rows, hidden] of ids and positions, each [rows]."""
Recorder = Callable[[Callable[[], torch.Tensor]], "tuple[Callable[[], None], torch.Tensor]"]
"""Records some work; gives what plays it again, and the tensor that its result is in each time."""


class CudaRecorder:
    """Records CUDA graphs. Their temporary memory is shared: they are played one after the other."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Recorder`. The work is done once before: libraries set themselves up at their first call."""
        aside, now = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            work()
        now.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = work()
        return graph.replay, result


class FixedAttention:
    """`Attention` of `rows` rows with one new token each over tables of `width` pages, with all sizes fixed.

    Args:
        pool: keys and values.
        gathered: [rows * width, page, 2, kv heads, head size], which every layer overwrites.
        windows: as of `TorchAttention`.
        rows, width: its sizes.

    Attributes:
        inputs: [rows, 3 + width] int64: of each row its token, how many it sees, the place of its keys and values, its
            pages.
    """

    mine: slice | None = None

    def __init__(
        self, pool: KvPool, gathered: torch.Tensor, windows: Sequence[int | None], rows: int, width: int
    ) -> None:
        self._pool, self._gathered, self._windows = pool, gathered, windows
        self._rows, self._width = rows, width
        self.inputs = torch.zeros(rows, 3 + width, dtype=torch.int64, device=gathered.device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def begin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens and their positions, each [rows]; all of a step happens on the device from here on."""
        ids, lengths, places = self.inputs[:, 0], self.inputs[:, 1], self.inputs[:, 2]
        self._places, self._tables = places.contiguous(), self.inputs[:, 3:].reshape(-1)
        at = torch.arange(self._width * self._pool.page, device=lengths.device)
        for window in {*self._windows, None}:
            hidden = at >= lengths[:, None]
            if window is not None:
                hidden |= at < lengths[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._gathered.dtype, device=lengths.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return ids.contiguous(), lengths - 1

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """As `Attention.attend`."""
        pool = self._pool.layers[layer]
        pool.flatten(0, 1).index_copy_(0, self._places, kv)
        torch.index_select(pool, 0, self._tables, out=self._gathered)
        gathered = self._gathered.view(self._rows, -1, *pool.shape[2:])
        keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
        folded = q.view(self._rows, keys.shape[1], -1, q.shape[-1])
        mask = self._masks[self._windows[layer] if self._windows else None]
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(self._rows, -1)


@dataclass(slots=True, frozen=True)
class _Recorded:
    attention: FixedAttention
    play: Callable[[], None]
    states: torch.Tensor


class DecodeGraphs:
    """Recorded steps of a model, made when they are first needed.

    Args:
        model: what is recorded.
        pool: keys and values; its last page belongs to nobody, the rows that fill a step up write there.
        windows: as of `TorchAttention`.
        record: how; on a CPU the work may simply be done again.
    """

    def __init__(self, model: Model, pool: KvPool, windows: Sequence[int | None], record: Recorder) -> None:
        self._model, self._pool, self._windows, self._record = model, pool, windows, record
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        layer = pool.layers[0]
        pages = _MAX_BYTES // (layer[0].numel() * layer.itemsize)
        self._gathered = torch.empty(pages, *layer.shape[1:], dtype=layer.dtype, device=layer.device)

    def fit(self, plan: Plan) -> bool:
        """Whether a step is one of those that are recorded."""
        if int(plan.counts.max()) > 1 or len(plan.counts) > _MAX_ROWS:
            return False
        rows, width = self._sizes(plan)
        return rows * width <= len(self._gathered)

    def states(self, plan: Plan, drawn: torch.Tensor | None) -> torch.Tensor:
        """A step's tokens behind the last layer, [rows, hidden]; valid until the next step of the same size.

        Args:
            plan: a step that fits.
            drawn: tokens that the step before has drawn; a plan that carries none over needs none.
        """
        rows, width = sizes = self._sizes(plan)
        recorded = self._recorded.get(sizes)
        if recorded is None:
            attention = FixedAttention(self._pool, self._gathered[: rows * width], self._windows, rows, width)
            self._fill(attention.inputs, plan, drawn)
            played = self._record(lambda: self._model(*attention.begin(), attention))
            recorded = self._recorded[sizes] = _Recorded(attention, *played)
        else:
            self._fill(recorded.attention.inputs, plan, drawn)
        recorded.play()
        return recorded.states[: len(plan.counts)]

    def _fill(self, inputs: torch.Tensor, plan: Plan, drawn: torch.Tensor | None) -> None:
        # The device does this behind what it was told before, so a step that it still plays keeps its numbers.
        numbers = self._numbers(plan, inputs.shape[0], inputs.shape[1] - 3)
        inputs.copy_(upload(numbers, inputs.device), non_blocking=True)
        carry(inputs[:, 0], plan.carried, drawn)

    def _sizes(self, plan: Plan) -> tuple[int, int]:
        """Rows and pages of the recording that a plan needs: powers of two."""
        width = -(-int((plan.starts + plan.counts).max()) // self._pool.page)
        return 1 << (len(plan.counts) - 1).bit_length(), max(16, 1 << (width - 1).bit_length())

    def _numbers(self, plan: Plan, rows: int, width: int) -> Ints:
        page, spare, count = self._pool.page, self._pool.pages, len(plan.counts)
        numbers = np.zeros((rows, 3 + width), np.int64)
        used = min(width, plan.tables.shape[1])
        numbers[:count, 0], numbers[:count, 1] = plan.ids, plan.starts + 1
        numbers[:count, 2] = plan.tables[np.arange(count), plan.starts // page] * page + plan.starts % page
        numbers[:count, 3 : 3 + used] = plan.tables[:, :used]
        numbers[count:, 1], numbers[count:, 2], numbers[count:, 3] = 1, spare * page, spare
        return numbers


def carry(ids: torch.Tensor, carried: Ints | None, drawn: torch.Tensor | None) -> None:
    """Put tokens that the step before has drawn where a step goes on from them, on the device.

    Args:
        ids: the step's tokens; changed.
        carried: see `Plan`.
        drawn: what the step before has drawn; a failed row's token is none, any other will do.
    """
    if carried is not None:
        if drawn is None:
            raise ValueError("a step goes on from tokens, and none were drawn")
        at, drawn_at = upload(carried, ids.device)
        ids[at] = drawn[drawn_at].clamp(min=0)
