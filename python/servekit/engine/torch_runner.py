"""The runner that computes with torch, on a CPU or a CUDA device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from servekit.engine.attention_backends import make_attention
from servekit.engine.decode_graphs import CudaRecorder, DecodeGraphs, carry
from servekit.engine.device import DeviceError, choose_device, choose_dtype, download, share_threads, upload
from servekit.engine.kv_cache import KvPool
from servekit.engine.linear import DenseLinear, LinearFactory, choose_linear
from servekit.engine.logprobs import DeviceLogprobs, read_logprobs, read_prompt_logprobs
from servekit.engine.native_decoder import NativeDecoder
from servekit.engine.plan import NO_TOKEN, Ints, Plan, SamplingColumns, StepResult
from servekit.engine.sampler import Sampler
from servekit.models.decoder import Decoder
from servekit.models.registry import load_model, read_config, stored_format
from servekit.models.split import Cut, check_model

if TYPE_CHECKING:
    from servekit.engine.group import ReplicaGroup

logger = logging.getLogger(__name__)

_CPU_CONTEXTS = 8
_CPU_POOL_BYTES = 2 << 30
_CUDA_SHARE = 0.85
"""Share of the device's memory for weights, pool and activations."""
_CUDA_ACTIVATION_BYTES = 1 << 30


@dataclass(slots=True, frozen=True)
class Handle:
    """A launched step: how many rows, which of them are sampled, and what the device makes of them.

    The tensors are on their way to the host; on CUDA they are there when `done` has come.
    """

    rows: int
    sampled: Ints
    tokens: torch.Tensor | None
    logprobs: DeviceLogprobs | None
    prompt_logprobs: DeviceLogprobs | None
    done: torch.cuda.Event | None


class TorchRunner:
    """A model, its KV pool and its sampler; `info` says what was chosen for them.

    On CUDA nothing in `launch` waits for the device: what goes there lies in pinned memory, tokens that were drawn stay
    there for the next step, and steps that only decode are played from recordings.

    With a group it is a rank's part of that: states come from the stage before and go to the next one, and all ranks
    of the last stage sample the same tokens. Then each step is computed anew, and none is launched ahead.

    Args:
        graphs: the recordings, None to compute every step anew.
        group: the ranks of the replica, None if this one is alone.
        attention: see `make_attention`.

    Raises:
        DeviceError: that kind of attention can't be had.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        dtype: torch.dtype,
        device: torch.device,
        info: dict[str, Any],
        graphs: DecodeGraphs | None = None,
        group: ReplicaGroup | None = None,
        attention: str = "auto",
    ) -> None:
        config, cut = model.config, model.cut
        self.info = info
        self.ahead = 1 if device.type == "cuda" and group is None else 0
        self._graphs = graphs
        self._drawn: torch.Tensor | None = None
        self._model = model
        self._device, self._dtype = device, dtype
        self._group = group
        heads = cut.attention.span(config.heads).count
        windows = config.windows[cut.layers.start : cut.layers.stop]
        self._attention = make_attention(attention, pool, heads, config.head_size, dtype, device, windows, cut.queries)
        self._native = NativeDecoder.of(model, self._attention) if group is None else None
        self._sampler = Sampler(config.vocab_size, device)

    def launch(self, plan: Plan) -> Handle:
        """Compute a step; on CUDA it runs while the caller goes on."""
        with torch.inference_mode():
            states = self._states(plan)
            if self._group is not None and not self._model.cut.last:
                self._group.pass_on(states)
                return Handle(len(plan.counts), plan.sampled, None, None, None, None)
            return self._finish(plan, states)

    def _states(self, plan: Plan) -> torch.Tensor:
        """The step's tokens behind the last layer here, [tokens, hidden]."""
        if self._graphs is not None and self._graphs.fit(plan):
            return self._graphs.states(plan, self._drawn)
        positions = self._attention.begin(plan)
        # A copy where it is changed: the plan belongs to somebody else.
        ids = upload(plan.ids if plan.carried is None else plan.ids.copy(), self._device)
        carry(ids, plan.carried, self._drawn)
        if self._native is not None:
            return self._native.states(ids, positions)
        return self._model.states(ids, positions, self._attention, self._from_before(len(ids)))

    def launch_joint(self, plans: Sequence[Plan | None]) -> Handle:
        """Compute a step of ranks that share out attention by sequences.

        Args:
            plans: one of each data-parallel rank of the replica, None for one that has nothing to compute.

        Returns:
            The part of this rank's own plan; a step without rows if it has none.
        """
        assert self._group is not None
        own = self._group.rank.attn_dp
        counts = [0 if plan is None else len(plan.ids) for plan in plans]
        ends = np.cumsum(counts).tolist()
        with torch.inference_mode():
            plan = plans[own]
            positions = torch.empty(0, dtype=torch.int64, device=self._device)
            if plan is not None:
                positions = self._attention.begin(plan)
            self._attention.mine = slice(ends[own] - counts[own], ends[own])
            ids = upload(np.concatenate([plan.ids for plan in plans if plan is not None]), self._device)
            states = self._model.states(ids, positions, self._attention, self._from_before(len(ids)))
            found = Handle(0, np.zeros(0, np.int64), None, None, None, None)
            if not self._model.cut.last:
                self._group.pass_on(states)
                return found
            for dp, plan in enumerate(plans):
                # Logits are everybody's work, whosever they are.
                if plan is not None:
                    handle = self._finish(plan, states[ends[dp] - counts[dp] : ends[dp]])
                    found = handle if dp == own else found
        return found

    def _finish(self, plan: Plan, states: torch.Tensor) -> Handle:
        """Sample what a plan asks for from its tokens' states, [tokens, hidden]."""
        last = np.cumsum(plan.counts)[plan.sampled] - 1
        tokens = logprobs = prompt_logprobs = None
        if len(plan.sampled):
            logits = self._model.logits(states[upload(last, self._device)])
            self._drawn, logprobs = self._sample(logits, plan)
            tokens = download(self._drawn)
        if plan.prompt_logprobs is not None:
            prompt_logprobs = read_prompt_logprobs(self._model.logits, states, plan.prompt_logprobs)
        logprobs, prompt_logprobs = logprobs and logprobs.sent(), prompt_logprobs and prompt_logprobs.sent()
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Handle(len(plan.counts), plan.sampled, tokens, logprobs, prompt_logprobs, done)

    def _from_before(self, tokens: int) -> torch.Tensor | None:
        """States of the stage before, None in the first one."""
        if self._group is None or self._model.cut.first:
            return None
        x = torch.empty(tokens, self._model.config.hidden, dtype=self._dtype, device=self._device)
        return self._group.take(x)

    def _sample(self, logits: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        if plan.logprobs is None:
            return self._sampler.sample(logits, plan.sampling), None
        at = upload(plan.logprobs.at, self._device)
        # A copy: the sampler changes the logits in place.
        untouched = logits[at]
        tokens = self._sampler.sample(logits, plan.sampling)
        return tokens, read_logprobs(untouched, tokens[at], plan.logprobs)

    def collect(self, handle: Handle) -> StepResult:
        """Tokens of a launched step, [rows, 1], and the logprobs that were asked for."""
        if handle.done is not None:
            handle.done.synchronize()
        out = np.full((handle.rows, 1), NO_TOKEN, np.int64)
        if handle.tokens is not None:
            out[handle.sampled, 0] = handle.tokens.numpy()
        found = [h if h is None else h.fetch() for h in (handle.logprobs, handle.prompt_logprobs)]
        return StepResult(out, *found)


def load_torch_runner(
    path: Path,
    *,
    device: str,
    dtype: str,
    ranks: int,
    rank: int,
    page: int,
    max_model_len: int,
    max_total_tokens: int | None,
    progress: Callable[[int, int], None],
    join: Callable[[torch.device], ReplicaGroup] | None = None,
    partition: Sequence[int] = (),
    attention: str = "auto",
    stage: Callable[[str], None] = lambda what: None,
    passed: Callable[[], None] | None = None,
) -> TorchRunner:
    """Load a model, or a rank's part of it, and make room for its KV pool.

    Args:
        path: folder or GGUF file.
        device: auto, cpu or cuda.
        dtype: auto, float32, float16 or bfloat16. On a CPU, auto is float32 arithmetic with the fastest linear layers,
            whose weights may be rounded to float16; on CUDA it is bfloat16.
        ranks, rank: of this machine, to share its cores and to choose among its devices.
        page: tokens in a KV page.
        max_model_len: context in tokens.
        max_total_tokens: size of the pool in tokens, None for what fits.
        progress: called with (tensors done, tensors in all).
        join: meets the other ranks of the replica; None if there are none.
        partition: layers of each stage; nothing makes them about equal.
        attention: see `make_attention`.
        stage: called with what loading goes on with, in words.
        passed: called behind each layer of a step, for it may take long.

    Raises:
        WeightError: the model can't be read.
        ConfigError: it can't be cut into so many parts.
        DeviceError: there is no such device, or too little memory on it.
        GroupError: other ranks did not come, or are lost.
    """
    began = time.monotonic()
    where = choose_device(device, rank)
    share_threads(where, ranks)
    config = read_config(path)
    kind = choose_dtype(dtype, where)
    if join is not None:
        stage("meeting the other ranks")
    group = None if join is None else join(where)
    stage("choosing how to compute")
    cut = Cut(range(config.layers))
    if group is not None:
        check_model(group.sizes, config.sizes(), partition)
        cut = Cut.of(group.rank, group.sizes, config.layers, partition)
    name: str = "torch"
    linear: LinearFactory = DenseLinear
    if where.type == "cpu" and kind == torch.float32:
        # Ranks of a group compute alike, so what each of them would choose by its own clock is not asked.
        exact = dtype == "float32" or group is not None
        name, linear = choose_linear(config.linear_shapes(), float32_only=exact, stored=stored_format(path))
    chosen = time.monotonic()
    try:
        model = load_model(path, config, linear, kind, where, progress, cut, None if group is None else group.stage)
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"the model does not fit on {where}: {str(error).splitlines()[0]}") from error
    if passed is not None:
        model.passed = passed
    stage("a KV pool")
    # What this rank keeps of each token.
    kept = (len(cut.layers), cut.attention.shared(config.kv_heads).count, config.head_size)
    tokens = _pool_tokens(KvPool.token_bytes(*kept, kind), where, max_model_len, max_total_tokens)
    pages = tokens // page
    if group is not None:
        pages = group.least(pages)
    if pages < 1:
        raise DeviceError(f"no room for a KV page of {page} tokens on {where}: take a smaller model")
    # One page more, where the rows write that fill recorded steps up.
    spare = 1 if where.type == "cuda" else 0
    try:
        pool = KvPool(*kept, pages + spare, page, kind, where)
    except (OSError, RuntimeError) as error:
        size = pages * page * KvPool.token_bytes(*kept, kind) >> 20
        raise DeviceError(f"no memory for a KV pool of {size} MiB: take a smaller --max-total-tokens") from error
    info = {
        "device": str(where),
        "dtype": str(kind).removeprefix("torch."),
        "linear": name,
        "threads": torch.get_num_threads() if where.type == "cpu" else 0,
        "vocab_size": config.vocab_size,
        "kv_pages": pages,
    }
    graphs = None
    if where.type == "cuda" and model.recordable and group is None:
        graphs = DecodeGraphs(model.states, pool, config.windows, CudaRecorder())
    runner = TorchRunner(model, pool, kind, where, info, graphs, group, attention)
    stage("a first step")
    _warm_up(runner, 1 if group is None else group.sizes.attn_dp)
    info["load_seconds"] = round(time.monotonic() - began, 2)
    logger.debug("linear layers chosen in %.2f s: %s", chosen - began, name)
    return runner


def _warm_up(runner: TorchRunner, shared: int) -> None:
    """Compute two tokens of one sequence in the first page, so that the first request does not pay for set-up.

    Args:
        shared: data-parallel ranks that compute their steps together; each has such a sequence.
    """
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    off, ones = np.zeros(1, np.float32), np.ones(1, np.float32)
    columns = SamplingColumns(off, ones, zero, off, zero.astype(np.uint64), zero)
    for start in range(2):
        plan = Plan(0, zero, zero + start, one, one[None], zero, columns)
        runner.collect(runner.launch(plan) if shared == 1 else runner.launch_joint([plan] * shared))


def _pool_tokens(each: int, device: torch.device, max_model_len: int, max_total_tokens: int | None) -> int:
    """Tokens of the pool, of so many bytes each."""
    if max_total_tokens is not None:
        return max_total_tokens
    if device.type == "cpu":
        return min(_CPU_CONTEXTS * max_model_len, _CPU_POOL_BYTES // each)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - total * (1 - _CUDA_SHARE)) - _CUDA_ACTIVATION_BYTES) // each
