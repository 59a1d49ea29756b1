"""What the detokenizer says adds up to the tokenizer's decoding of all ids, cut at the stop, whatever the steps."""

import functools
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servekit import _core, reference
from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput, FinishReason, Tensor
from servekit.messages.envelope import Kind, TextOptions, mint_rid
from servekit.reference import split_batch

from tests.property.vocabularies import GENERAL, MAKERS, RUNS, vocabulary

RID = mint_rid(1, 1, 5)
ENCODE = msgspec.msgpack.encode
DECODE = msgspec.msgpack.Decoder(BatchStrOutput).decode


def u32(ids: list[int]) -> bytes:
    return b"".join(id_.to_bytes(4, "little") for id_ in ids)


@functools.cache
def special(tokenizer: Any) -> set[int]:
    """Ids of special tokens."""
    return {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def decode_all(tokenizer: Any, ids: list[int], skip: bool) -> str:
    """The tokenizer's own decoding; the suffix decoder can't take an empty list."""
    shown = [id_ for id_ in ids if tokenizer.id_to_token(id_) is not None and not (skip and id_ in special(tokenizer))]
    return tokenizer.decode(shown, skip_special_tokens=False) if shown else ""


@dataclass
class Told:
    """Everything a worker was told of one request."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    completion_tokens: int = 0
    rows: int = 0
    after_end: int = 0

    def add(self, frames: list[tuple[int, int, bytes]]) -> None:
        for *_, body in frames:
            batch = DECODE(body)
            for row, _ in enumerate(batch.rids):
                self.rows += 1
                self.after_end += self.reason is not None
                piece = batch.output_strs[row]
                self.text += piece
                self.pieces.append(piece)
                if batch.output_ids is not None:
                    self.ids += memoryview(batch.output_ids[row]).cast("I").tolist()
                self.reason = self.reason or batch.finished_reasons[row]
                self.completion_tokens = batch.completion_tokens[row]
                assert piece or batch.finished_reasons[row] or (batch.output_ids and batch.output_ids[row])


def steps(ids: list[int], sizes: list[int], reason: FinishReason) -> list[BatchTokenIDOutput]:
    """The ids in steps of the given sizes, as often as needed, the last one finished."""
    out, at, i = [], 0, 0
    while at < len(ids) or not out:
        size = sizes[i % len(sizes)]
        row = ids[at : at + size]
        at, i = at + size, i + 1
        last = at >= len(ids)
        common = {"prompt_tokens": [3], "cached_tokens": [0], "retraction_counts": [0], "dp_ranks": [0]}
        reasons = [reason if last else None]
        done = [min(at, len(ids))]
        out.append(
            BatchTokenIDOutput([RID], finished_reasons=reasons, completion_tokens=done, decode_ids=[u32(row)], **common)
        )
    return out


def play(detokenizer: Any, batches: list[BatchTokenIDOutput]) -> tuple[Told, list[int]]:
    told, aborts = Told(), []
    for batch in batches:
        frames, aborted = detokenizer.step(ENCODE(batch))
        told.add(frames)
        aborts += aborted
    return told, aborts


@functools.cache
def detokenizer(name: str) -> Any:
    return _core.Detokenizer(vocabulary(name)[1])


def open_(target: Any, options: TextOptions, stream: bool) -> None:
    """Begin the request, which an example that failed may have left open."""
    target.fail(RID, 500, "error", "left over")
    target.open(RID, **msgspec.structs.asdict(options) | {"stops": list(options.stops)}, stream=stream)


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)


@st.composite
def ids_of(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of the vocabulary, more special ones than chance gives, and some outside of it."""
    size = vocabulary(name)[0].get_vocab_size()
    inside = st.integers(0, size - 1)
    return draw(st.lists(inside | st.integers(0, min(size - 1, 40)) | st.integers(size, 2**32 - 1), max_size=24))


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_pieces_add_up_to_the_decoding_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer, _ = vocabulary(name)
    ids, sizes = data.draw(ids_of(name)), data.draw(SIZES)
    skip, stream, wants_ids = (data.draw(st.booleans()) for _ in range(3))
    target = detokenizer(name)
    open_(target, TextOptions(skip_special_tokens=skip, ids=wants_ids), stream)
    told, aborts = play(target, steps(ids, sizes, FinishReason("length")))
    assert told.text == decode_all(tokenizer, ids, skip)
    assert told.ids == (ids if wants_ids else [])
    assert (told.reason, told.completion_tokens, aborts) == (FinishReason("length"), len(ids), [])
    assert stream or told.rows == 1
    assert target.live == 0


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - GENERAL - RUNS))
@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_complete_characters_go_out_at_once(name: str, data: st.DataObject) -> None:
    """After each step the text is all that the ids so far give, but for a last character that is incomplete."""
    tokenizer, _ = vocabulary(name)
    ids = data.draw(ids_of(name))
    target = detokenizer(name)
    open_(target, TextOptions(), stream=True)
    told = Told()
    for i, batch in enumerate(steps([*ids, 0], [1], FinishReason("length"))[:-1]):
        told.add(target.step(ENCODE(batch))[0])
        decoded = decode_all(tokenizer, ids[: i + 1], True)
        assert told.text in (decoded, decoded.removesuffix("\ufffd"))
    told.add(target.fail(RID, 500, "error", "enough"))
    assert told.text == decode_all(tokenizer, ids, True)


def first_stop(tokenizer: Any, ids: list[int], skip: bool, stops: list[str]) -> tuple[str, str, int] | None:
    """By brute force: text before the stop that is complete first, the stop, and the number of ids up to it."""
    text = decode_all(tokenizer, ids, skip)
    for end in range(1, len(text) + 1):
        matched = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if matched is not None:
            count = next(n for n in range(len(ids) + 1) if decode_all(tokenizer, ids[:n], skip)[:end] == text[:end])
            return text[: end - len(matched)], matched, count
    return None


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_the_first_complete_stop_ends_the_text(name: str, data: st.DataObject) -> None:
    tokenizer, _ = vocabulary(name)
    ids, sizes = data.draw(ids_of(name)), data.draw(SIZES)
    skip, stream, include = (data.draw(st.booleans()) for _ in range(3))
    text = decode_all(tokenizer, ids, skip)
    cuts = [(data.draw(st.integers(0, len(text))), data.draw(st.integers(1, 9))) for _ in range(3)]
    stops = [stop for at, size in cuts if (stop := text[at : at + size]) and "\ufffd" not in stop]
    stops.append(data.draw(st.text(min_size=1, max_size=3)))
    expected = first_stop(tokenizer, ids, skip, stops)
    target = detokenizer(name)
    open_(target, TextOptions(tuple(stops), skip_special_tokens=skip, include_stop=include, ids=True), stream)
    batches = steps(ids, sizes, FinishReason("length"))
    told, aborts = play(target, batches)
    if expected is None:
        assert (told.text, told.reason, aborts) == (text, FinishReason("length"), [])
    else:
        before, matched, count = expected
        assert told.text == before + matched * include
        assert told.reason == FinishReason("stop", matched)
        assert told.ids == ids[: told.completion_tokens]
        if name not in RUNS | GENERAL:
            assert told.completion_tokens == count
            assert aborts == ([] if count > len(ids) - len(batches[-1].decode_ids[0]) // 4 else [RID])
    assert told.after_end == 0
    assert stream or told.rows == 1
    assert target.live == 0


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - RUNS - GENERAL))
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_reference_says_the_same(name: str, data: st.DataObject) -> None:
    tokenizer, _ = vocabulary(name)
    ids, sizes = data.draw(ids_of(name)), data.draw(SIZES)
    text = decode_all(tokenizer, ids, True)
    at = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stops = tuple(stop for stop in [text[at : at + 2]] if stop and "\ufffd" not in stop)
    options = TextOptions(stops, ids=True, include_stop=data.draw(st.booleans()))
    end = data.draw(st.sampled_from([FinishReason("length"), FinishReason("stop", ids[-1] if ids else None)]))
    batches = steps(ids, sizes, end)
    plain = reference.Detokenizer(lambda ids, skip: decode_all(tokenizer, ids, skip))
    plain.open(RID, options)
    open_(detokenizer(name), options, True)
    rust, aborts = play(detokenizer(name), batches)
    python, python_aborts = play(plain, batches)
    assert (rust.text, rust.ids, rust.reason) == (python.text, python.ids, python.reason)
    assert (rust.completion_tokens, aborts) == (python.completion_tokens, python_aborts)


@given(st.lists(st.integers(0, 49151) | st.integers(), min_size=1, max_size=8), st.booleans(), st.booleans())
@settings(deadline=None)
def test_the_end_token_is_counted_and_has_no_text(ids: list[int], skip: bool, keep: bool) -> None:
    tokenizer, _ = vocabulary("smollm2")
    ids = [id_ % 2**32 for id_ in ids]
    target = detokenizer("smollm2")
    open_(target, TextOptions(skip_special_tokens=skip, no_stop_trim=keep, ids=True), True)
    told, _ = play(target, steps([*ids, 2], [3], FinishReason("stop", 2)))
    assert told.text == decode_all(tokenizer, [*ids, 2] if keep else ids, skip)
    assert (told.completion_tokens, told.ids) == (len(ids) + 1, [*ids, 2])


def logprobs(ids: list[int]) -> dict[str, list[Any]]:
    """Columns in which each item names its token."""
    packed, tops = u32(ids), [u32([id_, id_ + 1]) for id_ in ids]
    return {
        "output_token_logprobs_val": [packed],
        "output_token_logprobs_idx": [packed],
        "output_top_logprobs_val": [tops],
        "output_top_logprobs_idx": [tops],
    }


@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_ids_logprobs_and_text_go_together(data: st.DataObject) -> None:
    """Each id comes with its logprobs, not before its text, and none behind a stop."""
    name = data.draw(st.sampled_from(["smollm2", "byte level", "minilm"]))
    tokenizer, _ = vocabulary(name)
    ids = [id_ for id_ in data.draw(ids_of(name)) if id_ < 2**31]
    text = decode_all(tokenizer, ids, True)
    at = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stops = tuple(stop for stop in [text[at : at + 3]] if stop and "\ufffd" not in stop)
    target = detokenizer(name)
    open_(target, TextOptions(stops, ids=True, include_stop=True), True)
    seen, sent, prompt = [], "", []
    for i, batch in enumerate(steps(ids, data.draw(SIZES), FinishReason("length"))):
        row = memoryview(batch.decode_ids[0]).cast("I").tolist()
        batch = msgspec.structs.replace(batch, **logprobs(row))
        if i == 0:
            batch.input_token_logprobs_val = [b"once"]
        for *_, body in target.step(ENCODE(batch))[0]:
            out = DECODE(body)
            released = memoryview(out.output_ids[0]).cast("I").tolist()
            for column, values in logprobs(released).items():
                got = getattr(out, column)
                assert (got or [None])[0] == (values[0] if released else None), column
            seen += released
            sent += out.output_strs[0]
            prompt += [value for value in out.input_token_logprobs_val or [] if value]
            if out.finished_reasons[0] is None:
                alone = decode_all(tokenizer, seen, True)
                assert sent.startswith(alone) or sent == alone.removesuffix("\ufffd")
            else:
                assert out.completion_tokens[0] == len(seen)
    assert seen == ids[: len(seen)]
    assert prompt == [b"once"]


def test_columns_of_a_row_pass_with_it() -> None:
    target = detokenizer("smollm2")
    others = [mint_rid(worker, 1, counter) for counter, worker in enumerate((1, 2, 1))]
    for rid in others:
        target.open(rid)
    batch = BatchTokenIDOutput(
        others,
        http_worker_ipcs=["a", "b", "c"],
        prompt_tokens=[3, 300, 70000],
        completion_tokens=[1, 1, 1],
        cached_tokens=[0, 1, 2],
        retraction_counts=[4, 5, 6],
        dp_ranks=[0, 1, 2],
        decode_ids=[u32([504])] * 3,
        spec_verify_ct=[7, 8, 9],
        customized_info={"x": [1, {"deep": [2]}], "y": []},
        time_stats={"queue": [0.5, 1.5, 2.5]},
    )
    frames, _ = target.step(ENCODE(batch))
    assert [frame[:2] for frame in frames] == [(1, 1), (2, 1)]
    first, second = (DECODE(frame[2]) for frame in frames)
    assert (first.rids, second.rids) == ([others[0], others[2]], [others[1]])
    assert (first.http_worker_ipcs, first.prompt_tokens, first.cached_tokens) == (["a", "c"], [3, 70000], [0, 2])
    assert (first.retraction_counts, first.dp_ranks, first.spec_verify_ct) == ([4, 6], [0, 2], [7, 9])
    assert (first.customized_info, first.time_stats) == ({"x": [1], "y": []}, {"queue": [0.5, 2.5]})
    assert second.customized_info == {"x": [{"deep": [2]}], "y": []}
    assert first.output_ids is None and first.output_top_logprobs_val is None
    for rid in others:
        assert len(target.fail(rid, 500, "error", "over")) == 1


def test_a_stop_inside_a_row_cuts_everything_behind_it() -> None:
    tokenizer, _ = vocabulary("smollm2")
    ids = tokenizer.encode("one two three four").ids
    target = detokenizer("smollm2")
    open_(target, TextOptions(("three",), ids=True), True)
    batch = BatchTokenIDOutput([RID], completion_tokens=[10 + len(ids)], decode_ids=[u32(ids)], **logprobs(ids))
    frames, aborts = target.step(ENCODE(batch))
    row = DECODE(frames[0][2])
    assert (row.output_strs, row.finished_reasons, aborts) == (["one two "], [FinishReason("stop", "three")], [RID])
    assert row.completion_tokens == [10 + 3]
    assert row.output_ids == row.output_token_logprobs_val == [u32(ids[:3])]
    assert row.output_top_logprobs_idx == logprobs(ids[:3])["output_top_logprobs_idx"]
    # What the rank still says is consumed silently; its end frees the state.
    assert target.step(ENCODE(batch)) == ([], [])
    assert target.live == 1
    batch.finished_reasons = [FinishReason("abort")]
    dropped = target.counts[0]
    assert target.step(ENCODE(batch)) == ([], [])
    assert (target.live, target.counts[0]) == (0, dropped)


def test_unknown_and_finished_requests_are_counted_and_dropped() -> None:
    target = _core.Detokenizer(vocabulary("plain")[1])
    target.open(RID)
    batch = BatchTokenIDOutput([RID], [None], [FinishReason("length")], decode_ids=[u32([0])])
    frames, _ = target.step(ENCODE(batch))
    assert len(frames) == 1
    assert target.step(ENCODE(batch)) == ([], [])
    assert target.fail(RID, 500, "error", "late") == []
    assert (target.live, target.counts[0]) == (0, 2)


def test_a_failure_is_the_last_row_and_brings_the_held_text() -> None:
    tokenizer, _ = vocabulary("smollm2")
    target = detokenizer("smollm2")
    open_(target, TextOptions(("abcdef",)), True)
    ids = tokenizer.encode("xabc").ids
    told = Told()
    batch = BatchTokenIDOutput(
        [RID], prompt_tokens=[7], completion_tokens=[len(ids)], decode_ids=[u32(ids)], dp_ranks=[1]
    )
    told.add(target.step(ENCODE(batch))[0])
    assert told.text == "x"
    frames = target.fail(RID, 503, "error", "rank 1 is gone")
    told.add(frames)
    row = DECODE(frames[0][2])
    assert told.text == "xabc"
    assert row.finished_reasons == [FinishReason("error", None, "rank 1 is gone", 503)]
    assert (row.prompt_tokens, row.completion_tokens, row.dp_ranks) == ([7], [len(ids)], [1])


@pytest.mark.parametrize("bad", [{"decode_ids": [b"abc"]}, {"output_token_logprobs_val": [b"12345678"]}])
def test_a_broken_row_ends_its_request_alone(bad: dict[str, Any]) -> None:
    target = detokenizer("smollm2")
    good = mint_rid(1, 1, 6)
    target.open(RID)
    target.open(good)
    batch = BatchTokenIDOutput([RID, good], decode_ids=[u32([504]), u32([504])])
    for name, (value,) in bad.items():
        setattr(batch, name, [value, u32([504])])
    frames, aborts = target.step(ENCODE(batch))
    told = DECODE(frames[0][2])
    assert [reason and (reason.type, reason.status) for reason in told.finished_reasons] == [("error", 500), None]
    assert told.output_strs[1] != ""
    assert aborts == [RID]
    batch.finished_reasons = [FinishReason("abort"), FinishReason("abort")]
    target.step(ENCODE(batch))
    assert target.live == 0


def test_a_row_for_several_steps_has_all_their_tokens() -> None:
    """A request that is not streamed gets everything at its end: texts, ids, logprobs, hidden states."""
    tokenizer, _ = vocabulary("smollm2")
    ids = tokenizer.encode("one two three").ids
    target = detokenizer("smollm2")
    open_(target, TextOptions(ids=True), False)
    state = Tensor("f32", [1], b"1234")
    batches = steps(ids, [1], FinishReason("length"))
    for i, batch in enumerate(batches):
        columns = logprobs([ids[i]]) | {"output_hidden_states": [[state] * i], "time_stats": {"queue": [i]}}
        frames, _ = target.step(ENCODE(msgspec.structs.replace(batch, **columns)))
        assert bool(frames) == (i == len(batches) - 1)
    row = DECODE(frames[0][2])
    assert (row.output_strs, row.output_ids) == (["one two three"], [u32(ids)])
    assert {name: getattr(row, name) for name in logprobs(ids)} == logprobs(ids)
    assert row.output_hidden_states == [[state] * sum(range(len(ids)))]
    assert row.time_stats == {"queue": [len(ids) - 1]}


def test_rows_with_and_without_logprobs_share_a_frame() -> None:
    target = detokenizer("smollm2")
    others = [mint_rid(1, 1, counter) for counter in range(3)]
    for rid in others:
        target.open(rid)
    ids = [u32([504])] * 3
    batch = BatchTokenIDOutput(others, None, [FinishReason("length")] * 3, decode_ids=ids)
    batch.output_token_logprobs_val = [None, b"1234"]
    batch.output_hidden_states = [[], [], [Tensor("f32", [1], b"1234")]]
    row = DECODE(target.step(ENCODE(batch))[0][0][2])
    assert row.output_token_logprobs_val == [None, b"1234", None]
    assert row.output_hidden_states == batch.output_hidden_states


@pytest.mark.parametrize("tokenizer", ["smollm2", None])
def test_ids_alone_go_to_their_workers_as_they_came(tokenizer: str | None) -> None:
    target = detokenizer(tokenizer) if tokenizer else _core.Detokenizer()
    alone, other = mint_rid(1, 1, 1), mint_rid(2, 1, 2)
    target.open(alone, text=tokenizer is None, ids=True)
    target.open(other, text=tokenizer is None, ids=True)
    body = ENCODE(BatchTokenIDOutput([alone], completion_tokens=[1], decode_ids=[u32([504])]))
    assert target.step(body) == ([(1, 1, body)], [])
    last = [None, FinishReason("length")]
    body = ENCODE(BatchTokenIDOutput([alone, other], None, last, completion_tokens=[2, 1], decode_ids=[u32([5]), b""]))
    assert target.step(body) == (split_batch(Kind.BATCH_TOKEN_ID, body), [])
    target.fail(alone, 0, "abort", "")


def test_text_and_ids_alone_in_one_step() -> None:
    target = detokenizer("smollm2")
    read, counted = mint_rid(1, 1, 11), mint_rid(1, 1, 12)
    target.open(read)
    target.open(counted, text=False, ids=True)
    word = u32([vocabulary("smollm2")[0].token_to_id("word")])
    body = ENCODE(BatchTokenIDOutput([read, counted], completion_tokens=[1, 1], decode_ids=[word] * 2))
    (text, ids), _ = target.step(body)
    assert DECODE(text[2]).rids == [read]
    assert ids[2] == _core.handle_output_by_index(body, 1)


def test_a_request_for_ids_alone_that_fails_ends_with_an_error_row() -> None:
    target = _core.Detokenizer()
    target.open(RID)
    [(_, _, body)] = target.fail(RID, 503, "error", "gone")
    assert DECODE(body).finished_reasons == [FinishReason("error", None, "gone", 503)]
    assert target.live == 0


@given(st.binary(max_size=200))
def test_garbage_raises(body: bytes) -> None:
    with pytest.raises(_core.MalformedError):
        detokenizer("plain").step(body)


def test_the_general_way_has_bounded_work() -> None:
    """Text that never becomes clean is passed on after a window of ids, not decoded from the start for ever."""
    assert detokenizer("smollm2").is_table
    assert not detokenizer("suffix").is_table
    unclean = vocabulary("suffix")[0].token_to_id("\ufffd")
    target = detokenizer("suffix")
    open_(target, TextOptions(), True)
    told, _ = play(target, steps([unclean] * 300, [1], FinishReason("length")))
    assert told.text == "\ufffd" * 300
    assert max(map(len, told.pieces)) <= 64
