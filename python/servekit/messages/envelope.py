"""The envelope: the first frame of every message, and all that the control process reads of one.

Layout in bytes (little-endian); `docs/wire.md` shows one of each kind in hex, `rust/servekit-core/src/wire/envelope.rs`
is the twin of this file and both are held to the golden frames in `tests/data/`.

    0  u32 length          bytes of this frame, extensions included
    4  u32 magic           "SVK1"
    8  u16 version         schema version
   10  u16 kind            `Kind`
   12  u16 flags           `FLAG_*`
   14  u16 sender          worker number, rank, or 0 for control
   16  u32 sender_epoch    life of the sender that wrote the frame
   20  u32 receiver_epoch  life of the receiver it is meant for; 0 means any (HELLO only)
   24  u64 seq             number of the frame on its link, from 1
   32  u64 id              request id, correlation id or step number, by kind
   40  ...                 section by kind, see `_SECTION`
       ...                 extensions: u16 type, u16 zero, u32 length, bytes; unknown types are kept as they are
"""

from __future__ import annotations

import enum
import struct

import msgspec

MAGIC = int.from_bytes(b"SVK1", "little")
VERSION = 1

FLAG_LOAD = 1
"""The batch section holds a load report; without it, its load fields say nothing."""
FLAG_STREAM = 2
"""A request whose client reads text as it comes; without it the detokenizer sends one row at the end."""

WANT_INCLUDE_STOP = 1
WANT_SKIP_SPECIAL = 2
WANT_TEXT = 4
WANT_IDS = 8
WANT_NO_STOP_TRIM = 16


class Kind(enum.IntEnum):
    """What a message is. The numbers are the wire's; gaps leave room within a family."""

    HELLO = 1
    ACK = 2
    GENERATE = 16
    EMBEDDING = 17
    ABORT = 18
    BATCH_TOKEN_ID = 32
    BATCH_STR = 33
    BATCH_EMBEDDING = 34
    PROFILE = 48
    FLUSH_CACHE = 49
    PAUSE = 50
    CONTINUE = 51
    SET_LOG_LEVEL = 52
    GET_STATE = 53
    ACTIVE_RANKS = 54
    ABORT_REQUESTS = 55
    CONTROL_REPLY = 63
    KV_EVENT = 80
    LOAD_ADAPTER = 81
    UNLOAD_ADAPTER = 82


class Ext(enum.IntEnum):
    """Types of extensions that an envelope may carry after its section."""

    PRIORITY = 1
    TENANT = 2
    DEADLINE = 3
    TRACE = 4
    GROUP = 5
    ROOM = 6
    CACHE_SALT = 7
    PREFIX_HASHES = 8
    TEXT = 9
    NAME = 10
    BUILD = 11


class Group(msgspec.Struct, frozen=True):
    """Place of a message in a request of several prompts or choices.

    Members with the same `prompt` number have the same prompt and go to one rank.
    """

    id: int
    index: int
    size: int
    prompt: int


class TextOptions(msgspec.Struct, frozen=True):
    """What the detokenizer shard must know of a request. `stops` are non-empty strings."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    text: bool = True
    ids: bool = False
    no_stop_trim: bool = False


class Load(msgspec.Struct, frozen=True):
    """A rank's report. Every request with a dispatch number up to `last_dispatch` that is not released counts.

    Attributes:
        running: requests in the batch.
        waiting: requests seen and not yet running, whatever the reason.
        held_tokens: KV tokens held by running requests.
        pending_tokens: prompt tokens left to compute, of waiting and running requests.
        pool_tokens: size of the KV pool in tokens.
    """

    running: int = 0
    waiting: int = 0
    held_tokens: int = 0
    pending_tokens: int = 0
    pool_tokens: int = 0


class Envelope(msgspec.Struct):
    """A parsed envelope. Fields that its kind's section lacks keep their defaults.

    Attributes:
        id: request id (requests, ABORT), correlation id (control and its replies), step number (batches), number of the
            last frame that was handled (ACK).
        rank: rank named by the client or chosen by the router, -1 for none; for batches and replies the sender's.
        tokens: estimated tokens of work, for requests: the prompt's length.
        attempt: which try at the request this is, from 1.
        dispatch: number of the dispatch to the rank, given by the router; 0 before that.
        rows: requests in a batch.
        last_dispatch: highest dispatch number the rank has seen.
        schema: hash of the message definitions, in HELLO.
        exts: extensions that are not decoded into a field above, in order.
    """

    kind: Kind
    id: int = 0
    flags: int = 0
    sender: int = 0
    sender_epoch: int = 0
    receiver_epoch: int = 0
    seq: int = 0
    rank: int = -1
    tokens: int = 0
    attempt: int = 0
    dispatch: int = 0
    rows: int = 0
    last_dispatch: int = 0
    load: Load | None = None
    schema: int = 0
    exts: list[tuple[int, bytes]] = []

    def ext(self, type_: Ext) -> bytes | None:
        """Bytes of the first extension of that type, or None."""
        return next((data for t, data in self.exts if t == type_), None)


_HEAD = struct.Struct("<IIHHHHIIQQ")
_REQUEST = struct.Struct("<iIIIQ")  # rank, tokens, attempt, zero, dispatch
_BATCH = struct.Struct("<IiQIIQQQ")  # rows, rank, last_dispatch, running, waiting, held, pending, pool
_CONTROL = struct.Struct("<iI")  # rank, zero
_HELLO = struct.Struct("<Q")  # schema
_EXT = struct.Struct("<HHI")
_GROUP = struct.Struct("<QIIQ")
_TEXT = struct.Struct("<BBH")
_U32 = struct.Struct("<I")

_REQUESTS = frozenset({Kind.GENERATE, Kind.EMBEDDING})
_BARE = frozenset({Kind.ACK, Kind.ABORT})
_BATCHES = frozenset({Kind.BATCH_TOKEN_ID, Kind.BATCH_STR, Kind.BATCH_EMBEDDING})


class EnvelopeError(ValueError):
    """A frame that is no envelope of this schema version; the text says why."""


def encode_envelope(e: Envelope) -> bytes:
    """Bytes of an envelope; the length field is filled in.

    Raises:
        struct.error: a field is outside its range on the wire.
    """
    if e.kind in _REQUESTS:
        section = _REQUEST.pack(e.rank, e.tokens, e.attempt, 0, e.dispatch)
    elif e.kind in _BATCHES:
        load = e.load or Load()
        section = _BATCH.pack(
            e.rows,
            e.rank,
            e.last_dispatch,
            load.running,
            load.waiting,
            load.held_tokens,
            load.pending_tokens,
            load.pool_tokens,
        )
    elif e.kind == Kind.HELLO:
        section = _HELLO.pack(e.schema)
    elif e.kind in _BARE:
        section = b""
    else:
        section = _CONTROL.pack(e.rank, 0)
    tail = b"".join(_EXT.pack(t, 0, len(data)) + data for t, data in e.exts)
    flags = e.flags | FLAG_LOAD if e.load is not None else e.flags & ~FLAG_LOAD
    length = _HEAD.size + len(section) + len(tail)
    head = _HEAD.pack(length, MAGIC, VERSION, e.kind, flags, e.sender, e.sender_epoch, e.receiver_epoch, e.seq, e.id)
    return head + section + tail


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """Parse an envelope.

    Raises:
        EnvelopeError: too short, wrong length, magic or version, unknown kind, or a broken extension.
    """
    if len(frame) < _HEAD.size:
        raise EnvelopeError(f"envelope of {len(frame)} bytes is shorter than its head")
    length, magic, version, kind, flags, sender, sender_epoch, receiver_epoch, seq, id_ = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise EnvelopeError(f"magic is {magic:#x}, not {MAGIC:#x}")
    if version != VERSION:
        raise EnvelopeError(f"schema version is {version}, this build speaks {VERSION}")
    if length != len(frame):
        raise EnvelopeError(f"length field says {length}, frame has {len(frame)} bytes")
    try:
        kind = Kind(kind)
    except ValueError:
        raise EnvelopeError(f"unknown kind {kind}") from None
    e = Envelope(kind, id_, flags, sender, sender_epoch, receiver_epoch, seq, exts=[])
    at = _HEAD.size
    try:
        if kind in _REQUESTS:
            e.rank, e.tokens, e.attempt, _, e.dispatch = _REQUEST.unpack_from(frame, at)
            at += _REQUEST.size
        elif kind in _BATCHES:
            e.rows, e.rank, e.last_dispatch, *load = _BATCH.unpack_from(frame, at)
            if flags & FLAG_LOAD:
                e.load = Load(*load)
            at += _BATCH.size
        elif kind == Kind.HELLO:
            (e.schema,) = _HELLO.unpack_from(frame, at)
            at += _HELLO.size
        elif kind not in _BARE:
            e.rank, _ = _CONTROL.unpack_from(frame, at)
            at += _CONTROL.size
        while at < length:
            type_, _, size = _EXT.unpack_from(frame, at)
            at += _EXT.size
            if size > length - at:
                raise EnvelopeError(f"extension {type_} of {size} bytes goes beyond the frame")
            e.exts.append((type_, bytes(frame[at : at + size])))
            at += size
    except struct.error as error:
        raise EnvelopeError(f"truncated: {error}") from None
    return e


def group_ext(group: Group) -> tuple[int, bytes]:
    """Extension that says which group a message belongs to."""
    return Ext.GROUP, _GROUP.pack(group.id, group.index, group.size, group.prompt)


def text_ext(options: TextOptions) -> tuple[int, bytes]:
    """What the detokenizer must know: u8 wants, u8 zero, u16 stops, then per stop u32 length and UTF-8."""
    wants = (
        WANT_INCLUDE_STOP * options.include_stop
        | WANT_SKIP_SPECIAL * options.skip_special_tokens
        | WANT_TEXT * options.text
        | WANT_IDS * options.ids
        | WANT_NO_STOP_TRIM * options.no_stop_trim
    )
    stops = [stop.encode() for stop in options.stops]
    return Ext.TEXT, _TEXT.pack(wants, 0, len(stops)) + b"".join(_U32.pack(len(s)) + s for s in stops)


def decode_text_ext(data: bytes) -> TextOptions:
    """Inverse of `text_ext`.

    Raises:
        EnvelopeError: the bytes are no such extension.
    """
    try:
        wants, _, n = _TEXT.unpack_from(data)
        at, stops = _TEXT.size, []
        for _ in range(n):
            (size,) = _U32.unpack_from(data, at)
            at += _U32.size
            if at + size > len(data):
                raise EnvelopeError("stop string goes beyond its extension")
            stops.append(data[at : at + size].decode())
            at += size
    except (struct.error, UnicodeDecodeError) as error:
        raise EnvelopeError(f"broken text extension: {error}") from None
    if at != len(data):
        raise EnvelopeError("bytes left over in the text extension")
    return TextOptions(
        tuple(stops),
        bool(wants & WANT_INCLUDE_STOP),
        bool(wants & WANT_SKIP_SPECIAL),
        bool(wants & WANT_TEXT),
        bool(wants & WANT_IDS),
        bool(wants & WANT_NO_STOP_TRIM),
    )


def room_ext(room: int) -> tuple[int, bytes]:
    """Extension with a bootstrap room, 0 <= room < 2**64."""
    return Ext.ROOM, room.to_bytes(8, "little")


def name_exts(name: str, build: str) -> list[tuple[int, bytes]]:
    """Extensions of a HELLO: who speaks, and which build it is."""
    return [(Ext.NAME, name.encode()), (Ext.BUILD, build.encode())]


_WORKER_BITS, _EPOCH_BITS, _COUNTER_BITS = 12, 12, 40


def mint_rid(worker: int, epoch: int, counter: int) -> int:
    """A request id: 12 bits worker, 12 bits worker epoch, 40 bits counter. The id is the return address."""
    return (
        (worker << (_EPOCH_BITS + _COUNTER_BITS))
        | ((epoch & 0xFFF) << _COUNTER_BITS)
        | (counter & ((1 << _COUNTER_BITS) - 1))
    )


def route_of(rid: int) -> tuple[int, int]:
    """Worker and worker epoch that a request id leads back to."""
    return rid >> (_EPOCH_BITS + _COUNTER_BITS), (rid >> _COUNTER_BITS) & 0xFFF


def party_of_worker(worker: int) -> int:
    """Number of an HTTP worker among those that answer control messages: ranks count from 0, control is -1."""
    return -2 - worker


def party_title(number: int) -> str:
    """Who answers a control message under that number: `scheduler[dp=0]`, `control` or `http[0]`."""
    if number >= 0:
        return f"scheduler[dp={number}]"
    return "control" if number == -1 else f"http[{-2 - number}]"


def http_worker_ipc(worker: int, epoch: int) -> str:
    """File name, in the run directory, of the socket on which a worker receives."""
    return f"w{worker}-{epoch}.ipc"
