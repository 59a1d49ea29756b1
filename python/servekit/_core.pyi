"""The parts of servekit that are Rust. Bytes that are malformed raise, whatever they are."""

import os
from typing import Any, ClassVar, final

__all__ = [
    "ColumnError",
    "ControlPlane",
    "DPBudget",
    "DataParallelController",
    "DecoderLayers",
    "Detokenizer",
    "DispatchError",
    "Encoder",
    "KernelPool",
    "LoadBalanceMethod",
    "MalformedError",
    "MultiTokenizerRouter",
    "PagedAttention",
    "PhaseError",
    "Pulse",
    "RankReport",
    "ResourceError",
    "RowError",
    "ServekitError",
    "SettingError",
    "SilentError",
    "SocketMapping",
    "StatePage",
    "StoredMatrix",
    "TextStreams",
    "build_info",
    "escape_json",
    "extract_field_by_index",
    "handle_output_by_index",
    "merge_batches",
    "parse_envelope",
    "parse_group",
    "parse_text_options",
    "prefix_hashes",
    "schema_hash",
    "set_parent_death_signal",
    "split_batch",
    "split_batch_by_name",
    "watch_death_pipe",
    "zmq_has",
]

class ServekitError(Exception):
    """Base of the errors of this module."""

class MalformedError(ServekitError):
    """Bytes that are no frame of this schema version."""

class RowError(ServekitError, IndexError):
    """A row that the batch does not have."""

class ColumnError(ServekitError, KeyError):
    """A column that the batch does not have."""

class SettingError(ServekitError):
    """An argument that no call like this can take."""

class DispatchError(ServekitError):
    """No rank can take the request."""

class ResourceError(ServekitError):
    """A file, socket, segment or thread can't be had."""

class PhaseError(ServekitError):
    """It was not started yet, or is closed already."""

class SilentError(ServekitError):
    """A thread did not answer in time."""

def build_info() -> dict[str, str]:
    """What this build is: version, commit, profile, target, schema (hash of the messages, in hex), libzmq."""

def zmq_has(capability: str) -> bool:
    """Whether libzmq was built with a capability, such as `curve`."""

def watch_death_pipe(fd: int, paths: list[str] | list[os.PathLike[str]] | None = None) -> None:
    """End this process, whatever it is doing, once nobody holds the other end of a pipe; remove `paths` before.

    A thread owns the descriptor from now on. The exit status is 1; no exit handler runs.

    Raises:
        SettingError: `fd` is negative.
        ResourceError: the thread can't be started.
    """

def set_parent_death_signal(signal: int) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends. Linux only.

    Raises:
        SettingError: no signal has that number.
    """

def prefix_hashes(input_ids: bytes, salt: bytes | None = None) -> bytes:
    """Names of a prompt's prefixes of whole 64-token chunks, for the PREFIX_HASHES extension and `DPBudget.dispatch`.

    Args:
        input_ids: little-endian u32.
        salt: prompts of another salt share nothing.

    Returns:
        Little-endian u64, shortest prefix first, at most 512: each is a hash of all ids up to its place.

    Raises:
        SettingError: `input_ids` is no list of u32.
    """

def schema_hash() -> int:
    """Hash of all message definitions, as HELLO carries it."""

def parse_envelope(frame: bytes) -> dict[str, Any]:
    """Parse an envelope into the fields of `messages.envelope.Envelope`.

    Raises:
        MalformedError: it is none of this schema version.
    """

def parse_text_options(data: bytes) -> dict[str, Any]:
    """Parse a TEXT extension.

    Raises:
        MalformedError: it is none.
    """

def parse_group(data: bytes) -> tuple[int, int, int, int]:
    """Parse a GROUP extension: id, index, size, prompt.

    Raises:
        MalformedError: it is none.
    """

def split_batch(frame: bytes) -> list[tuple[int, int, bytes]]:
    """Split a batch by the workers that its request ids lead back to. Other threads run meanwhile.

    Args:
        frame: body of a `BatchTokenIDOutput`, `BatchStrOutput` or `BatchEmbeddingOutput` of n requests, as msgpack. Its
            name says which it is.

    Returns:
        For each worker, in the order of its first request: its number, the low 12 bits of its epoch, and a body of the
        same kind with its requests in their order. A batch of one worker comes back as the same object.

    Raises:
        MalformedError: it is no batch of this schema version.
    """

def split_batch_by_name(frame: bytes) -> list[tuple[str, bytes]]:
    """Split a batch by the names in its column `http_worker_ipcs`: name and body, as `split_batch`.

    Raises:
        MalformedError: it is no batch of this schema version, or a name is no text.
        ColumnError: a row has no name.
    """

def handle_output_by_index(frame: bytes, index: int) -> bytes:
    """The batch of one request.

    Args:
        frame: body of a batch of n requests.
        index: 0 to n - 1.

    Raises:
        MalformedError: it is no batch of this schema version.
        RowError: it has no such row.
    """

def extract_field_by_index(frame: bytes, field: str, index: int) -> bytes:
    """One column of one request, as msgpack of a column of its own: what the batch of that request has there.

    Raises:
        MalformedError: it is no batch of this schema version.
        RowError: it has no such row.
        ColumnError: its kind has no such column.
    """

def merge_batches(frames: list[bytes], positions: list[list[int]]) -> bytes:
    """Merge batches of one kind.

    Args:
        frames: bodies of batches.
        positions: `positions[p][i]` is the place of row i of frame p; together they are 0 to n - 1, each once.

    Raises:
        MalformedError: a body is no batch of this schema version, or they do not fit together.
    """

@final
class Detokenizer:
    """Incremental detokenizer of any number of requests.

    Frames are worker, low bits of its epoch, and the body of a `BatchStrOutput`.
    """

    def __new__(cls, tokenizer_file: str | os.PathLike[str] | None = None) -> Detokenizer:
        """A detokenizer over a `tokenizer.json`; without one it passes ids only.

        Raises:
            ResourceError: the file can't be read.
        """

    def open(
        self,
        rid: int,
        *,
        stops: list[str] = ...,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        text: bool = True,
        ids: bool = False,
        no_stop_trim: bool = False,
        stream: bool = True,
    ) -> None:
        """Begin a request; the options are those of `messages.envelope.TextOptions`."""

    def step(self, frame: bytes) -> tuple[list[tuple[int, int, bytes]], list[int]]:
        """Take the body of a batch: frames for workers, and requests that ended here by a stop string.

        Raises:
            MalformedError: it is no batch of this schema version.
        """

    def fail(self, rid: int, status: int, kind: str, message: str) -> list[tuple[int, int, bytes]]:
        """End a request without its rank's word: `kind` is error or abort, `status` an HTTP status."""

    @property
    def live(self) -> int:
        """Requests that it knows."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows of unknown requests, requests that failed here, requests opened twice."""

    @property
    def is_table(self) -> bool:
        """Whether text comes from a table of byte strings rather than from the tokenizer's own decoder."""

@final
class StatePage:
    """One shared memory segment that every process reads and that no lock guards.

    Each number is seen whole; two numbers may be of two moments. After `close` all methods raise `PhaseError`.
    """

    @staticmethod
    def create(name: str, workers: int, ranks: int, followers: int = 0) -> StatePage:
        """Make a page for 1 to 4096 workers and ranks, and up to as many followers, readable by this user only.

        Raises:
            SettingError: no plain file name, or a count out of range.
            ResourceError: the name is taken, or the system refuses.
        """

    @staticmethod
    def open(name: str) -> StatePage:
        """Map the page of that name.

        Raises:
            ResourceError: there is none.
            SettingError: it is no page of this version and size.
        """

    def unlink(self) -> None:
        """Remove the segment's name; maps that exist stay valid. Twice is no error."""

    def close(self) -> None:
        """Unmap it."""

    @property
    def name(self) -> str:
        """Name of the segment."""

    @property
    def phase(self) -> int:
        """0 starting, 1 ready, 2 draining, 3 stopping; main writes it."""

    @phase.setter
    def phase(self, value: int, /) -> None: ...
    @property
    def ready_once(self) -> bool:
        """Whether the server has been ready once."""

    def mark_ready(self) -> None:
        """Note that the server has been ready once."""

    def set_process(self, role: str, index: int, epoch: int, pid: int) -> None:
        """Note which life of a process is the present one.

        A new life of a worker holds no places; what it counted stays.

        Args:
            role: control, http, scheduler or follower.
            index: its number.
            epoch: the life, from 1.
            pid: its process id.
        """

    def relay_rank(
        self,
        index: int,
        epoch: int,
        pulse_age_s: float,
        phase: str,
        phase_age_s: float,
        moved_age_s: float,
        step: int,
        awaits: bool,
    ) -> None:
        """Show what was told of a rank on another machine, in place of the rank, which can't write here.

        Args:
            index: the rank; followers are counted behind the ranks.
            epoch: which life of it this is.
            pulse_age_s: seconds since its last pulse.
            phase, phase_age_s, step: what its engine does, since how many seconds, and in which step.
            moved_age_s: seconds since it got ahead with that.
            awaits: whether it waits for others of its group.

        Raises:
            SettingError: an unknown phase.
        """

    def end_process(self, role: str, index: int) -> None:
        """Note that a process has ended: it holds nothing any more, what it counted stays.

        Args:
            role, index: as for `set_process`.
        """

    def worker_add(self, index: int, field: str, delta: int) -> None:
        """Add to a number of a worker, stopping at 0; for that worker only.

        Args:
            index: the worker.
            field: a number that `snapshot` shows of a worker, but epoch and pid.
            delta: what to add.
        """

    def count_tokens(self, index: int, rank: int, prompt: int, cached: int, generated: int) -> None:
        """Add to a worker's counts of the tokens of a rank; for that worker only.

        Args:
            index, rank: the worker and the rank; one that the page does not describe is nothing.
            prompt: tokens of prompts that the rank has begun to answer.
            cached: those of them that it had cached.
            generated: tokens that it generated.
        """

    def observe(self, index: int, histogram: str, seconds: float, times: int = 1) -> None:
        """Count values of as many seconds in a worker's histogram; for that worker only.

        Args:
            index: the worker.
            histogram: first_token, gap, end_to_end or queue.
            seconds: the value; what is no number or below 0 counts as 0.
            times: how many values.
        """

    def histograms(self) -> dict[str, tuple[list[float], list[int], float]]:
        """What all workers counted, dead ones included, by histogram.

        Upper bounds of its buckets in seconds, inclusive; how many values lie in each, and how many above all bounds;
        seconds of all values together.
        """

    def reserve(self, index: int, requests: int, tokens: int, max_requests: int) -> bool:
        """Take places for a worker's requests if all workers together then hold at most `max_requests`.

        Two workers that ask at once may go over by what each asked for; the router has the final word.
        """

    def release(self, index: int, requests: int, tokens: int) -> None:
        """Give places back that `reserve` took."""

    def control_age(self) -> float:
        """Seconds since the oldest beat of a control thread; infinite while one has not beaten yet."""

    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed, as control last said."""

    def active_ranks(self) -> list[bool]:
        """Whether each rank takes requests."""

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values: phase, ready_once, control, and one dict each of ranks, followers and workers."""

@final
class Encoder:
    """A model's tokenizer for prompts. Ids are those of the library `tokenizers`, for less.

    Texts are split at special tokens, and the ids of such segments are remembered; so are the words of byte-level
    vocabularies. Threads may encode at the same time.
    """

    def __new__(cls, tokenizer_file: str | os.PathLike[str], remembered: int) -> Encoder:
        """Read a `tokenizer.json`; its truncation and padding are ignored.

        Args:
            remembered: most bytes of segments to remember.

        Raises:
            ResourceError: there is no such file, or it is no tokenizer.
        """

    def encode(self, texts: list[str], special: bool) -> list[bytes]:
        """Ids of each text, as little-endian u32.

        Args:
            special: add the tokens that the tokenizer wants around a text.

        Raises:
            SettingError: the model has no token for a part of a text, and none for what it does not know.
        """

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Texts looked up, those of which a part was known, tokens of all, tokens that were known, bytes held now."""

    @property
    def knows_words(self) -> bool:
        """Whether texts are cut into words here, rather than by the library."""

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""

@final
class TextStreams:
    """Event streams of an HTTP worker whose events differ in their text alone, by request id.

    It turns the rows of a `BatchStrOutput` into bytes to write in one call, without decoding the batch.
    """

    def __new__(cls) -> TextStreams: ...
    def open(self, rid: int, before: bytes, after: bytes, chunked: bool, sink: Any, tokens: int) -> None:
        """Begin to render the rows of a request; one that was open is replaced.

        Args:
            before, after: the event around the JSON string of the text.
            chunked: make each event an HTTP chunk.
            sink: returned with the request's events.
            tokens: what its rows reported so far.
        """

    def close(self, rid: int) -> int | None:
        """Leave a request's rows alone again.

        Returns:
            Tokens that its rows reported last; None if it is not open.
        """

    def tokens(self, rid: int) -> int | None:
        """Tokens of a request so far; None if it is not open."""

    def render(
        self, body: bytes
    ) -> tuple[list[tuple[Any, bytes]], bytes | None, tuple[int, int, list[tuple[float, int]]]]:
        """Make events of a batch.

        Returns:
            Sinks with what is to be written, in the order of the rows; rows without text write nothing. And the batch
            of all other rows, None if there are none: those of requests that are not open, and last rows, with which
            a request is closed here. Then of all rows of open requests, last ones included: which rank made them, -1
            if they do not tell; how many tokens they bring beyond those that were reported before; and seconds since a
            request's row before, each with the number of rows of which it is true.

        Raises:
            MalformedError: the bytes are no such batch, or an open request's text is missing or no UTF-8.
        """

    def __len__(self) -> int:
        """Requests that are open."""

def escape_json(text: str) -> bytes:
    """The text as it stands between the quotes of a JSON string.

    U+0085, U+2028 and U+2029, which some clients take for line ends, are escaped too.

    Raises:
        UnicodeEncodeError: the text has a lone surrogate.
    """

@final
class LoadBalanceMethod:
    """How a rank is chosen among the active ones; see `servekit-serve --help`."""

    AUTO: ClassVar[LoadBalanceMethod]
    ROUND_ROBIN: ClassVar[LoadBalanceMethod]
    FOLLOW_BOOTSTRAP_ROOM: ClassVar[LoadBalanceMethod]
    TOTAL_REQUESTS: ClassVar[LoadBalanceMethod]
    TOTAL_TOKENS: ClassVar[LoadBalanceMethod]
    CACHE_AWARE: ClassVar[LoadBalanceMethod]

    @staticmethod
    def from_name(name: str) -> LoadBalanceMethod:
        """The method of that name on the command line.

        Raises:
            SettingError: there is none.
        """

    @property
    def name(self) -> str:
        """Its name on the command line."""

    def __hash__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...

@final
class Pulse:
    """A thread that shows on the state page, every 200 ms, that a rank's process runs, and what its engine does.

    It needs no GIL: it beats on while Python computes, waits or hangs.
    """

    def __new__(cls, page: str, rank: int, epoch: int) -> Pulse:
        """Start to beat.

        Args:
            page: name of the state page.
            rank: the rank; followers are counted behind the ranks.
            epoch: which life of it this is.

        Raises:
            ResourceError: there is no such page, or no thread.
            SettingError: the page has no such rank.
        """

    def enter(self, phase: str, step: int) -> None:
        """Say what the engine does from now on.

        Args:
            phase: loading, idle, working (on messages and plans), computing, or waiting for its group to compute.
            step: the step that it computes, or computed last; 0 before the first.

        Raises:
            SettingError: an unknown phase.
        """

    def awaits(self, peers: bool) -> None:
        """Say whether it waits for others of its group from now on, in the middle of a step."""

    def moved(self) -> None:
        """Say that it gets ahead with that: by a layer, or by what it has sent."""

    def close(self) -> None:
        """Stop to beat. Twice is no error."""

@final
class RankReport:
    """A rank's own word on its load. Every request up to `last_dispatch` that it has not released counts."""

    def __new__(
        cls, rank: int, last_dispatch: int, requests: int, tokens: int, pending: int | None = None
    ) -> RankReport:
        """A report; `pending` are those of the tokens that are still to compute, all if not given."""

    @staticmethod
    def from_envelope(frame: bytes) -> RankReport | None:
        """The report in the envelope of a rank's batch; None if it has none.

        Raises:
            MalformedError: it is no envelope of a batch.
        """

    @property
    def rank(self) -> int:
        """Number of the rank."""

    @property
    def last_dispatch(self) -> int:
        """Highest dispatch number that it has seen."""

    @property
    def requests(self) -> int:
        """Requests that it has not released, running or waiting."""

    @property
    def tokens(self) -> int:
        """Tokens: held by running requests or still to compute."""

    @property
    def pending(self) -> int:
        """Those of them that are still to compute."""

    def __eq__(self, value: object, /) -> bool: ...

@final
class DPBudget:
    """The load of each rank: what it last reported, plus what was dispatched and not yet seen by it.

    Dispatches are numbered from 1; a report names the highest number that its rank has seen and counts every request
    up to it that is not released. All ranks begin active and idle.
    """

    def __new__(cls, dp_size: int) -> DPBudget:
        """A budget for 1 to 4096 ranks.

        Raises:
            SettingError: another number.
        """

    def dispatch(
        self, method: LoadBalanceMethod, tokens: int, room: int | None = None, prefixes: bytes | None = None
    ) -> tuple[int, int]:
        """Choose a rank for a request of `tokens` prompt tokens and book it there: rank and number of the dispatch.

        `prefixes` are the prompt's `prefix_hashes`, for CACHE_AWARE: what the chosen rank probably has cached is not
        charged, and it is remembered that it has the prompt now.

        Raises:
            DispatchError: no rank is active, or the room's rank is not, or the method needs a room and there is none.
            MalformedError: `prefixes` is no list of u64.
        """

    def credit(self, rank: int, tokens: int, prefixes: bytes | None = None) -> int:
        """Book a request at a rank that somebody named, as if it had been chosen: number of the dispatch.

        Raises:
            DispatchError: there is no such rank, or it is not active.
            MalformedError: `prefixes` is no list of u64.
        """

    def update(self, report: RankReport) -> bool:
        """Take a rank's report; False if it is older than a known one, or of ranks or dispatches that never were."""

    def release(self, rank: int, dispatch: int) -> bool:
        """Take back a dispatch that no report will show; False if one has."""

    def reset(self, rank: int) -> None:
        """Forget all that a rank was charged with, and what it had cached."""

    def forget_prefixes(self) -> None:
        """Forget what every rank had cached."""

    def set_active(self, rank: int, active: bool) -> None:
        """Let a rank take requests, or not."""

    @property
    def active(self) -> list[bool]:
        """Whether each rank takes requests."""

    @property
    def total_requests(self) -> list[int]:
        """Requests of each rank."""

    @property
    def total_tokens(self) -> list[int]:
        """Tokens of each rank."""

@final
class DataParallelController:
    """Sends each request to the rank that a method chooses, and learns from the ranks' batches what they hold.

    One thread that never takes the GIL. Messages are an envelope, a body and attachments; of a request only the
    envelope is read: rank (named by the client, -1 for none), tokens, and the ROOM extension. Rank, dispatch number,
    epochs and number on the link are written into it. Aborts and control messages go to every rank. It keeps no table
    of requests: `MultiTokenizerRouter` does.

    Addresses are `ipc:///path` or `tcp://127.0.0.1:port`; times are in seconds.
    """

    def __new__(
        cls,
        *,
        ingress: str,
        egress: str,
        ranks: list[str],
        method: LoadBalanceMethod = ...,
        output: str | None = None,
        epoch: int = 1,
    ) -> DataParallelController:
        """A controller that does not run yet; all its ranks are active.

        Args:
            ingress: bound; requests are pushed to it.
            egress: bound; ranks push their batches to it, of which the load reports are read.
            ranks: bound; rank r pulls from the r-th.
            method: how a rank is chosen.
            output: connected; every message of a rank goes on to it, and one finished row of type error for each
                request that no rank takes. Without it such requests are only counted.
            epoch: life of this controller, from 1.

        Raises:
            SettingError: no ranks or more than 4096, or an address that others than this machine reach.
        """

    def start(self) -> None:
        """Bind the sockets and start the thread.

        Raises:
            PhaseError: it was started before.
            ResourceError: a socket or the thread can't be had.
        """

    def wait(self, timeout: float) -> str | None:
        """Wait for something to go wrong for good; what it was, or None."""

    def stop(self, timeout: float) -> bool:
        """End the thread; whether it has ended. Twice is no error."""

    def set_active(self, rank: int, active: bool) -> None:
        """Let a rank take requests, or not."""

    @property
    def active(self) -> list[bool]:
        """Whether each rank takes requests."""

    @property
    def total_requests(self) -> list[int]:
        """Requests of each rank, as `DPBudget.total_requests`."""

    @property
    def total_tokens(self) -> list[int]:
        """Tokens of each rank, as `DPBudget.total_tokens`."""

    def counters(self) -> dict[str, int]:
        """Messages: dispatched, refused, broadcast, reports, reports_ignored, malformed; dropped ends of requests."""

@final
class MultiTokenizerRouter:
    """Takes requests of any number of workers, sends each to a rank, remembers it until its end, and splits the ranks'
    batches over the workers.

    This is the router of `ControlPlane` with its detokenizer and fan-out, over sockets that the caller names. Both
    sides greet: a worker or rank opens its link with HELLO and gets one. A worker receives at `w{worker}-{epoch}.ipc`
    in the run directory; its requests carry ids of `messages.envelope.mint_rid`. Without a tokenizer, workers get ids.

    Addresses are `ipc:///path` or `tcp://127.0.0.1:port`; times are in seconds.
    """

    def __new__(
        cls,
        *,
        ingress: str,
        egress: str,
        ranks: list[str],
        run_dir: str | os.PathLike[str],
        worker_epochs: list[int] = ...,
        rank_epochs: list[int] | None = None,
        epoch: int = 1,
        method: LoadBalanceMethod = ...,
        tokenizer_file: str | os.PathLike[str] | None = None,
        rank_wait_timeout: float = 30.0,
        max_queued_requests: int = 1024,
        max_queued_tokens: int | None = None,
        max_requests_per_worker: int | None = None,
        resume_memory: int = ...,
    ) -> MultiTokenizerRouter:
        """A router that does not run yet.

        Args:
            ingress: bound; workers push to it.
            egress: bound; ranks push to it.
            ranks: bound; rank r pulls from the r-th.
            run_dir: folder of the workers' sockets.
            worker_epochs: present life of each worker, from 1; one worker if not given.
            rank_epochs: present life of each rank, from 1; all 1 if not given.
            epoch: life of this router, from 1.
            method: how a rank is chosen.
            tokenizer_file: `tokenizer.json`; without one, requests get ids only.
            rank_wait_timeout: how long a request waits while no rank is active.
            max_queued_requests: most requests in flight; further ones end with an error at once.

        Raises:
            SettingError: one of them is out of range.
        """

    def start(self) -> None:
        """Bind the sockets and start the threads; each rank takes requests once it has greeted.

        Raises:
            PhaseError: it was started before.
            ResourceError: a socket, the tokenizer or a thread can't be had.
        """

    def wait(self, timeout: float) -> str | None:
        """Wait for something to go wrong for good; what it was, or None."""

    def set_rank(self, rank: int, active: bool, reason: str = "", epoch: int | None = None) -> None:
        """Let a life of a rank (None: the present one) take requests, or end what it has with `reason`."""

    def worker_down(self, worker: int, epoch: int | None = None) -> None:
        """End what a life of a worker had (None: of the present one): it is gone."""

    def drain(self, timeout: float) -> bool:
        """Take no further request and wait until none is in flight; whether that came true."""

    def stop(self, timeout: float) -> bool:
        """End all threads; whether they have ended. Twice is no error."""

    def state(self) -> str:
        """Ranks, workers, requests in flight and counters, as JSON.

        Raises:
            SilentError: the router did not answer in time.
        """

@final
class SocketMapping:
    """Sends to HTTP workers; connects to one when the first message for it comes.

    It connects nowhere but to sockets in the run directory, whose names follow from worker and epoch. Frames to a
    worker are numbered; the worker tells the highest number that it has handled (in an ACK), and whoever gets that
    calls `acknowledge`.
    """

    def __new__(
        cls,
        run_dir: str | os.PathLike[str],
        worker_epochs: list[int] | None = None,
        epoch: int = 1,
        max_unacknowledged: int = ...,
    ) -> SocketMapping:
        """A mapping of the life `epoch` of its process.

        Args:
            run_dir: folder of the sockets.
            worker_epochs: present life of each worker, from 1; without it, whatever worker and life an id names.
            epoch: life of the sender.
            max_unacknowledged: bytes that a worker may have been sent and not acknowledged, 64 MiB if not given;
                further messages are dropped and counted.

        Raises:
            SettingError: `worker_epochs` is empty, too long or holds 0.
        """

    def send_output(self, rid: int, envelope: bytes, body: bytes) -> bool:
        """Send a message to the worker that a request id leads back to. Never waits.

        The envelope may be anybody's: sender, epochs and number are written anew.

        Returns:
            Whether it is on its way; if not, too much waits for the worker or that life of it is over.

        Raises:
            MalformedError: the envelope is none.
        """

    def acknowledge(self, rid: int, number: int) -> bool:
        """The worker of a request id has handled all messages up to that number; False if it was never sent so many."""

    def remove(self, worker: int) -> None:
        """Close a worker's sockets and send nothing to this life of it any more."""

    def clear_all_sockets(self) -> None:
        """Close every socket; the next message for a worker connects again."""

    def __len__(self) -> int: ...
    def counters(self) -> dict[int, dict[str, int]]:
        """For each worker that anything was meant for, by number: messages, bytes, lost, cuts, unroutable,
        unacknowledged_frames, unacknowledged_bytes.
        """

@final
class ControlPlane:
    """The threads of the control process: router, detokenizer shards and fan-out. They never take the GIL.

    Methods may be called from any thread, and let others run while they wait. Times are in seconds.
    """

    def __new__(
        cls,
        *,
        run_dir: str | os.PathLike[str],
        epoch: int,
        rank_epochs: list[int],
        worker_epochs: list[int],
        detokenizer_workers: int = 1,
        load_balance_method: str = "auto",
        tokenizer_file: str | os.PathLike[str] | None = None,
        state_page: str | None = None,
        rank_wait_timeout: float = 30.0,
        max_queued_requests: int = 1024,
        max_unacknowledged: int = ...,
        max_queued_tokens: int | None = None,
        max_requests_per_worker: int | None = None,
        resume_memory: int = ...,
        remote: tuple[str, int, list[tuple[int, int]]] | None = None,
    ) -> ControlPlane:
        """A plane that does not run yet.

        Args:
            run_dir: folder of the sockets.
            epoch: life of this control process, from 1.
            rank_epochs, worker_epochs: present life of each rank and HTTP worker.
            detokenizer_workers: detokenizer threads, 1 to 62.
            load_balance_method: name of a `LoadBalanceMethod`.
            tokenizer_file: `tokenizer.json`; without one, requests get ids only.
            state_page: name of the state page, to be written.
            rank_wait_timeout: how long a request waits while no rank is active.
            max_queued_requests: most requests in flight beyond those that the active ranks run at once.
            max_unacknowledged: bytes that a worker may have been sent and not acknowledged, 64 MiB if not given; over
                that its requests end with an error.
            max_queued_tokens: most prompt tokens that wait to be computed, None for any number.
            max_requests_per_worker: most requests in flight of one worker, None for any number.
            resume_memory: most bytes of requests' frames that are kept until the requests end, 256 MiB if not given.
            remote: for ranks on other machines, the secret CURVE key of the sockets where they come in, the descriptor
                of the one that takes what they send, and each such rank with that of the one where it fetches. All
                listen on TCP and do not block; they belong to the plane once it starts.

        Raises:
            SettingError: one of them is out of range.
        """

    def start(self) -> None:
        """Bind the sockets and start the threads.

        Raises:
            PhaseError: it was started before.
            ResourceError: a socket, the state page, the tokenizer or a thread can't be had.
        """

    def wait(self, timeout: float) -> str | None:
        """Wait for something to go wrong for good; what it was, or None."""

    def set_rank(
        self, rank: int, active: bool, reason: str = "", max_running: int = 0, epoch: int | None = None
    ) -> None:
        """Let a life of a rank take requests, running at most `max_running` at once, or end what it has with `reason`.

        It takes requests once it has greeted this process, too. `epoch` names the life, None the present one; a life
        that takes no requests is over.
        """

    def worker_down(self, worker: int, epoch: int | None = None) -> None:
        """End what a life of a worker had (None: of the present one): it is gone."""

    def fail_all(self, message: str, timeout: float) -> int:
        """End every request with an error and take no further one; how many there were.

        Returns once their ends have been handed to the sockets, or when the time is over.

        Raises:
            SilentError: the router did not answer in time.
        """

    def drain(self, timeout: float) -> bool:
        """Take no further request and wait until none is in flight; whether that came true."""

    def stop(self, timeout: float) -> bool:
        """End all threads; whether they have ended. Twice is no error."""

    def state(self) -> str:
        """What the control process holds, as JSON.

        Raises:
            SilentError: the router did not answer in time.
        """

    def next_log(self, timeout: float) -> tuple[int, str, str] | None:
        """The next log line as level (as in `logging`), thread and text; None if none came in time."""

    @property
    def log_level(self) -> int:
        """Least level that the threads write, as in `logging`; 0 until a control message has set one."""

@final
class KernelPool:
    """The threads that share the CPU engine's arithmetic, and the instructions it is done with.

    Everything here and in the classes below that are made from it takes addresses of memory that stays where it is, as
    `torch.Tensor.data_ptr` gives them: float32 unless said otherwise, rows side by side unless there is a stride, which
    counts numbers. Nothing is checked: what is not there crashes the process. `servekit.engine.native` checks.

    `formats` are name, weights in a block and bytes of a block of every way to store weights that there are kernels
    for. `level` is portable, avx2 or avx512.
    """

    formats: ClassVar[list[tuple[str, int, int]]]
    def __new__(cls, threads: int) -> KernelPool:
        """Start threads; the caller is one of them.

        Raises:
            ResourceError: the system gives none.
        """

    @property
    def level(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def rms_norm(self, x: int, out: int, weight: int, eps: float, rows: int, width: int) -> None:
        """Write x / sqrt(mean(x * x) + eps) * weight for each row to out, which may be x."""

    def rotate(self, x: int, stride: int, cos: int, sin: int, tokens: int, heads: int, size: int) -> None:
        """Rotate the halves of [tokens, heads, size] in place, tokens `stride` apart; tables are [tokens, size]."""

    def add(self, x: int, y: int, count: int) -> None:
        """Add `count` numbers at y to those at x; they are apart."""

    def silu_mul(self, x: int, out: int, rows: int, width: int) -> None:
        """Write silu(gate) * up, [rows, width], of x, [rows, gates then ups]."""

@final
class StoredMatrix:
    """A linear layer over weights as their file stores them."""

    def __new__(cls, pool: KernelPool, format: str, weights: int, bias: int, rows: int, width: int) -> StoredMatrix:
        """A layer of `rows` outputs and `width` inputs; `bias` is 0 for none. The memory must outlive it.

        Raises:
            SettingError: there is no kernel for this format and width.
        """

    def apply(self, x: int, out: int, count: int, stride: int) -> None:
        """Write x @ weights.T + bias for `count` rows; rows of out are `stride` apart."""

@final
class PagedAttention:
    """Attention of new tokens over pages [pages, page, 2, kv heads, size].

    A token's result is the same to the last bit whether it is computed alone or with others of its sequence.
    """

    def __new__(cls, pool: KernelPool, heads: int, kv_heads: int, size: int, page: int) -> PagedAttention:
        """Raises:
        SettingError: there is no kernel for this head size.
        """

    def store(self, layer: int, kv: int, stride: int, places: int, count: int) -> None:
        """Copy keys and values of new tokens, `stride` apart, to their places in the pages (int64)."""

    def attend(self, layer: int, q: int, q_stride: int, out: int, out_stride: int, sequences: Any, window: int) -> None:
        """Attend for the new tokens of some sequences.

        Args:
            q, out: [tokens, heads * size]; the sequences' rows are told by them.
            sequences: an object with these attributes, of which all but the sizes are addresses of int64 numbers:
                `count` sequences; `firsts`, of each the first of its rows, which lie side by side; `counts` of these
                rows, at least 1; `lengths`, its tokens in the pages, those among them; `tables` [count, width] of page
                numbers, with their `width`.
            window: how many tokens one sees, itself among them; 0 for all.
        """

@final
class DecoderLayers:
    """The layers of a decoder, one after the other in one call; layer by layer they are the calls above."""

    def __new__(cls, attention: PagedAttention, hidden: int, layers: list[Any]) -> DecoderLayers:
        """Layers of states of `hidden` numbers, described by the attributes of `servekit.engine.native_decoder.Layer`.

        Raises:
            SettingError: linear layers that don't fit each other.
        """

    def run(self, x: int, count: int, cos: int, sin: int, places: int, sequences: Any) -> None:
        """Change the states of `count` new tokens, [count, hidden], in place.

        Args:
            cos, sin: tables as of `KernelPool.rotate`.
            places: as of `PagedAttention.store`, of the tokens' keys and values.
            sequences: as of `PagedAttention.attend`; every token is one of theirs.
        """
