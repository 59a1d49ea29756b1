"""Write the golden frames (`tests/data/golden.json`) and the frames shown in `docs/wire.md`.

Run `python tests/contract/write_golden.py` after a change of the message definitions, and look at the difference.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
from servekit.messages import batches, requests
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import (
    FLAG_STREAM,
    Envelope,
    Group,
    Kind,
    Load,
    TextOptions,
    encode_envelope,
    group_ext,
    mint_rid,
    name_exts,
    room_ext,
    text_ext,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/golden.json"
DOCUMENT = ROOT / "docs/wire.md"
MARK = "<!-- Made by tests/contract/write_golden.py from here on. -->"

RID = mint_rid(3, 2, 0x0102030405)
OTHER = mint_rid(4, 2, 1)
TEXT = TextOptions(("END", "§"), include_stop=True, skip_special_tokens=False, ids=True)


def _u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def messages() -> list[tuple[Envelope, Any]]:
    """One message of each kind: envelope and decoded body."""
    sampling = requests.SamplingParams(16, temperature=0.5, seed=7, stop_token_ids=[2])
    generate = requests.TokenizedGenerateReqInput(RID, _u32(1, 504, 30), sampling, stream=True, bootstrap_room=9)
    text = [text_ext(TEXT), group_ext(Group(RID, 1, 2, 0)), room_ext(9), (999, b"kept")]
    common = {"prompt_tokens": [3, 300], "completion_tokens": [2, 16], "cached_tokens": [0, 0], "dp_ranks": [1, 1]}
    length = batches.FinishReason("length")
    token_ids = batches.BatchTokenIDOutput(
        [RID, OTHER],
        finished_reasons=[None, length],
        decode_ids=[_u32(28), _u32(260, 2)],
        output_token_logprobs_val=[b"\0\0\x80\xbf"],
        customized_info={"draft": [1]},
        **common,
    )
    strs = batches.BatchStrOutput([RID, OTHER], finished_reasons=[None, length], output_strs=[" a", ""], **common)
    embeddings = batches.BatchEmbeddingOutput(
        [RID, OTHER],
        prompt_tokens=[3, 4],
        embeddings=batches.Tensor("f32", [2, 1], b"\0\0\x80\x3f\0\0\0\x40"),
    )
    rank = {"sender": 1, "sender_epoch": 5, "receiver_epoch": 6, "seq": 8, "id": 77, "rows": 2, "rank": 1}
    load = Load(running=2, waiting=1, held_tokens=321, pending_tokens=40, pool_tokens=65536)
    worker = {"sender": 3, "sender_epoch": 2, "receiver_epoch": 6, "seq": 4, "id": RID}
    request = {**worker, "flags": FLAG_STREAM, "tokens": 3}
    embedding = requests.TokenizedEmbeddingReqInput(RID, _u32(1, 2))
    control = [
        (Kind.PROFILE, requests.ProfileReq(True, "/tmp/profile")),
        (Kind.FLUSH_CACHE, requests.FlushCacheReq()),
        (Kind.PAUSE, requests.PauseReq()),
        (Kind.CONTINUE, requests.ContinueReq()),
        (Kind.SET_LOG_LEVEL, requests.SetLogLevelReq("debug")),
        (Kind.ABORT_REQUESTS, requests.AbortRequestsReq(["chatcmpl-7", "0010010000000001"])),
        (Kind.GET_STATE, requests.GetStateReq()),
        (Kind.ACTIVE_RANKS, requests.ActiveRanksOutput([True, False])),
    ]
    reply = requests.ControlReply(True, data=b"{}", asked=[0, 1])
    return [
        (
            Envelope(
                Kind.HELLO, sender=3, sender_epoch=2, seq=1, schema=schema_hash(), exts=name_exts("http", "0.1.0")
            ),
            None,
        ),
        (Envelope(Kind.ACK, **{**worker, "id": 41}), None),
        (Envelope(Kind.GENERATE, rank=-1, attempt=1, dispatch=12, exts=text, **request), generate),
        (Envelope(Kind.EMBEDDING, rank=0, **request), embedding),
        (Envelope(Kind.ABORT, **worker), requests.AbortReq(RID, "client left")),
        (Envelope(Kind.BATCH_TOKEN_ID, last_dispatch=12, load=load, **rank), token_ids),
        (Envelope(Kind.BATCH_STR, **{**rank, "sender": 0}), strs),
        (Envelope(Kind.BATCH_EMBEDDING, last_dispatch=12, **rank), embeddings),
        *((Envelope(kind, rank=-1, **worker), body) for kind, body in control),
        (Envelope(Kind.CONTROL_REPLY, **{**rank, "rows": 0, "id": RID}), reply),
    ]


def golden() -> list[dict[str, Any]]:
    """The golden frames as plain values: bytes in hex, and what a reader must find in the envelope."""
    frames = []
    for envelope, body in messages():
        load = envelope.load and list(msgspec.structs.astuple(envelope.load))
        fields = msgspec.structs.asdict(envelope) | {"kind": int(envelope.kind), "load": load}
        fields["exts"] = [[int(kind), data.hex()] for kind, data in envelope.exts]
        fields["flags"] |= envelope.load is not None
        frames.append(
            {
                "name": envelope.kind.name,
                "envelope": encode_envelope(envelope).hex(),
                "body": msgspec.msgpack.encode(body).hex(),
                "fields": fields,
            }
        )
    return frames


def _hex(data: str) -> str:
    lines = []
    for at in range(0, len(data), 64):
        words = (data[i : i + 8] for i in range(at, min(at + 64, len(data)), 8))
        lines.append(f"{at // 2:04x}  {' '.join(words)}")
    return "\n".join(lines)


def document(head: str) -> str:
    """`docs/wire.md` with the frames below the part that is written by hand."""
    parts = [head.split(MARK)[0] + MARK]
    for frame, (_, body) in zip(golden(), messages(), strict=True):
        parts.append(
            f"### {frame['name']}\n\nEnvelope:\n\n```text\n{_hex(frame['envelope'])}\n```\n\n"
            f"Body: {type(body).__name__ if body is not None else 'nil'}\n\n```text\n{_hex(frame['body'])}\n```"
        )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write both files."""
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")
    DOCUMENT.write_text(document(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
