"""Both languages read the golden frames, which are what this build writes; the document shows them."""

import json

import msgspec
import pytest
from servekit import _core
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import Ext, Kind, decode_envelope, decode_text_ext, encode_envelope

from tests.contract import write_golden

FRAMES = json.loads(write_golden.GOLDEN.read_text())
RESERVED = {Kind.KV_EVENT, Kind.LOAD_ADAPTER, Kind.UNLOAD_ADAPTER}


def test_golden_frames_are_what_this_build_writes():
    assert write_golden.golden() == FRAMES, "run python tests/contract/write_golden.py and look at the difference"


def test_every_kind_has_one():
    assert {frame["name"] for frame in FRAMES} == {kind.name for kind in Kind if kind not in RESERVED}


def test_document_shows_them():
    text = write_golden.DOCUMENT.read_text()
    assert write_golden.document(text) == text, "run python tests/contract/write_golden.py"


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame["name"])
def test_python_reads_it(frame):
    envelope = decode_envelope(bytes.fromhex(frame["envelope"]))
    expected = {**frame["fields"], "exts": [(kind, bytes.fromhex(data)) for kind, data in frame["fields"]["exts"]]}
    found = msgspec.structs.asdict(envelope)
    found["load"] = envelope.load and list(msgspec.structs.astuple(envelope.load))
    assert found == expected
    assert encode_envelope(envelope).hex() == frame["envelope"]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame["name"])
def test_rust_reads_it(frame):
    found = _core.parse_envelope(bytes.fromhex(frame["envelope"]))
    if found.get("load") is not None:
        found["load"] = list(found["load"])
    found["exts"] = [[kind, data.hex()] for kind, data in found["exts"]]
    assert found == {name: frame["fields"][name] for name in found}


def test_rust_reads_text_options():
    frame = next(frame for frame in FRAMES if frame["name"] == "GENERATE")
    data = decode_envelope(bytes.fromhex(frame["envelope"])).ext(Ext.TEXT)
    options = decode_text_ext(data)
    assert _core.parse_text_options(data) == {**msgspec.structs.asdict(options), "stops": list(options.stops)}
    assert options == write_golden.TEXT


def test_both_languages_have_the_same_schema():
    assert _core.schema_hash() == schema_hash()


@pytest.mark.parametrize("cut", [0, 1, 39, 40, 63, -1])
def test_cut_envelopes_are_refused(cut):
    frame = bytes.fromhex(next(frame for frame in FRAMES if frame["name"] == "GENERATE")["envelope"])
    with pytest.raises(_core.MalformedError):
        _core.parse_envelope(frame[:cut])
