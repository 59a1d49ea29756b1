"""Balance requests over three Python processes, with the router and with `DPBudget`.

    python examples/balance_requests.py

No server is needed: this process is the router and the worker that asks, its three children are the ranks.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq
from servekit._core import DPBudget, LoadBalanceMethod, MultiTokenizerRouter, RankReport
from servekit.config.port_args import EGRESS, INGRESS, PortArgs, rank_ipc
from servekit.messages.batches import BatchTokenIDOutput, FinishReason
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import Envelope, Kind, Load, TextOptions, http_worker_ipc, mint_rid, text_ext
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.transport.rank_link import RankLink
from servekit.transport.sender import Link, SenderWrapper

RANKS = 3
PROMPTS = [900, 20, 20, 20, 300, 20, 500, 20, 20, 20, 20, 20]
"""Tokens of each prompt: some are long."""


def rank(folder: str, number: int) -> None:
    """A rank that answers every request with the last id of its prompt, once it has seen them all."""
    ports = PortArgs(
        run_dir=folder, main_pid=0, host="", port=0, state_page="", info="", tokenizer_file="",
        control_epoch=1, worker_epochs=[1], rank_epochs=[1] * RANKS,
    )  # fmt: skip
    link = RankLink(ports, number, 1, f"rank {number}", "example")
    while True:
        for envelope, request in link.receive(None):
            if envelope.kind == Kind.GENERATE:
                row = BatchTokenIDOutput(
                    rids=[envelope.id],
                    finished_reasons=[FinishReason("length")],
                    completion_tokens=[1],
                    decode_ids=[request.input_ids[-4:]],
                )
                link.send_batch(row, Load())


def main() -> None:
    """Ask, and show who answered."""
    # The budget alone, for those who have sockets of their own: it counts what was dispatched and what ranks report.
    budget = DPBudget(RANKS)
    chosen = [budget.dispatch(LoadBalanceMethod.TOTAL_TOKENS, tokens) for tokens in PROMPTS]
    print("chosen", [rank for rank, _ in chosen], "tokens", budget.total_tokens)
    first = chosen[0][0]
    budget.update(RankReport(first, last_dispatch=chosen[-1][1], requests=0, tokens=0))
    print(f"rank {first} is done, tokens", budget.total_tokens)

    with tempfile.TemporaryDirectory(prefix="servekit-example-") as folder:
        address = f"ipc://{folder}/"
        router = MultiTokenizerRouter(
            ingress=address + INGRESS,
            egress=address + EGRESS,
            ranks=[address + rank_ipc(rank) for rank in range(RANKS)],
            run_dir=folder,
            method=LoadBalanceMethod.ROUND_ROBIN,
        )
        router.start()
        children = [subprocess.Popen([sys.executable, __file__, folder, str(rank)]) for rank in range(RANKS)]
        try:
            ask(Path(folder), router)
        finally:
            for child in children:
                child.kill()
                child.wait()
            router.stop(1.0)


def ask(folder: Path, router: MultiTokenizerRouter) -> None:
    """Be worker 0: send all prompts, then read all answers."""
    deadline = time.monotonic() + 30
    while not all(rank["active"] for rank in json.loads(router.state())["ranks"]):
        if time.monotonic() > deadline:
            sys.exit("the ranks do not come")
        time.sleep(0.05)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    answers = context.socket(zmq.PULL)
    answers.setsockopt(zmq.RCVTIMEO, 30_000)
    answers.bind(f"ipc://{folder / http_worker_ipc(0, 1)}")
    sender = SenderWrapper(context, folder / INGRESS, Link(0, 1, 1, "example", schema_hash(), "example"))
    for number, tokens in enumerate(PROMPTS):
        rid = mint_rid(0, 1, number)
        ids = number.to_bytes(4, "little") * tokens
        envelope = Envelope(Kind.GENERATE, rid, tokens=tokens, exts=[text_ext(TextOptions(text=False, ids=True))])
        sender.send(envelope, TokenizedGenerateReqInput(rid, ids, SamplingParams(1)))
    answered: dict[int, int] = {}
    answers.recv_multipart()  # the greeting
    while len(answered) < len(PROMPTS):
        _, body = answers.recv_multipart()
        batch = msgspec.msgpack.decode(body, type=BatchTokenIDOutput)
        for rid, ids, rank in zip(batch.rids, batch.decode_ids or [], batch.dp_ranks or [], strict=True):
            assert int.from_bytes(ids, "little") == rid & 0xFF, "each answer is its own request's"
            answered[rid] = rank
    print("answers of each rank", [list(answered.values()).count(rank) for rank in range(RANKS)])
    sender.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        rank(sys.argv[1], int(sys.argv[2]))
    main()
