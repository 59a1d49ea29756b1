"""Make text of token ids as they come: whole characters only, and nothing that could still become a stop string.

    python examples/detokenize_stream.py [tokenizer.json]

No server is needed. Without a file, a tokenizer whose tokens are single bytes shows it best.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
from servekit._core import Detokenizer
from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput
from servekit.messages.envelope import mint_rid
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEXT = "Grüße, 日本 😀! END and what nobody reads"


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer with one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


with tempfile.TemporaryDirectory(prefix="servekit-example-") as folder:
    if len(sys.argv) > 1:
        file = Path(sys.argv[1])
    else:
        file = Path(folder) / "tokenizer.json"
        bytes_tokenizer().save(str(file))
    ids = Tokenizer.from_file(str(file)).encode(TEXT, add_special_tokens=False).ids
    detokenizer = Detokenizer(file)

rid = mint_rid(0, 1, 1)
detokenizer.open(rid, stops=["END"])
pieces = []
for count, token in enumerate(ids, 1):
    step = BatchTokenIDOutput(rids=[rid], completion_tokens=[count], decode_ids=[token.to_bytes(4, "little")])
    frames, ended = detokenizer.step(msgspec.msgpack.encode(step))
    for _worker, _epoch, body in frames:
        row = msgspec.msgpack.decode(body, type=BatchStrOutput)
        pieces += row.output_strs or []
        print(count, row.output_strs, (row.finished_reasons or [None])[0])
    if ended:
        break
print("".join(pieces))
