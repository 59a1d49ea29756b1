"""Split a batch over the workers that its request ids lead back to, and send each its part.

    python examples/split_batch.py

No server is needed: three sockets of this process are the workers.
"""

import tempfile

import msgspec
import zmq
from servekit._core import SocketMapping, extract_field_by_index, handle_output_by_index, split_batch
from servekit.messages.batches import BatchStrOutput
from servekit.messages.envelope import Envelope, Kind, encode_envelope, http_worker_ipc, mint_rid

WORKERS = 3

with tempfile.TemporaryDirectory(prefix="servekit-example-") as folder:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    workers = [context.socket(zmq.PULL) for _ in range(WORKERS)]
    for number, socket in enumerate(workers):
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.bind(f"ipc://{folder}/{http_worker_ipc(number, 1)}")

    # A request id is its return address: worker, life of the worker, counter.
    batch = BatchStrOutput(
        rids=[mint_rid(i % WORKERS, 1, i) for i in range(8)],
        output_strs=[f"piece {i}" for i in range(8)],
        completion_tokens=list(range(8)),
    )
    frame = msgspec.msgpack.encode(batch)
    print("one row", msgspec.msgpack.decode(handle_output_by_index(frame, 4), type=BatchStrOutput).output_strs)
    print("one field", msgspec.msgpack.decode(extract_field_by_index(frame, "completion_tokens", 4)))

    # Nobody registers: the mapping connects to a worker when the first message for it comes.
    mapping = SocketMapping(folder)
    for worker, epoch, body in split_batch(frame):
        rows = len(msgspec.msgpack.decode(body, type=BatchStrOutput).rids)
        assert mapping.send_output(
            mint_rid(worker, epoch, 0), encode_envelope(Envelope(Kind.BATCH_STR, rows=rows)), body
        )
    for number, socket in enumerate(workers):
        socket.recv_multipart()  # the greeting
        part = msgspec.msgpack.decode(socket.recv_multipart()[1], type=BatchStrOutput)
        print(f"worker {number}", part.output_strs)
    context.destroy(linger=0)
