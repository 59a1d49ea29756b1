//! Bytes in, events out; and the few envelopes that the control process writes itself.

use std::sync::Arc;

use servekit_zmq::Message;

use super::event::{Ask, Event, Peer, Request, Rows, Share, Side};
use crate::dispatch::MAX_HASHES;
use crate::log::Level;
use crate::wire::envelope::FLAG_STREAM;
use crate::wire::{
    Envelope, EnvelopeBuilder, Ext, Group, Kind, Load, Rid, ScannedBatch, Section, TextOptions, WireError,
};

/// A message: envelope, body, attachments.
pub type Frames = Vec<Message>;

impl Share for Frames {
    fn share(&mut self) -> Self {
        self.iter_mut().map(Message::share).collect()
    }
}

/// The control process as a sender.
const CONTROL: u16 = 0;

/// Nil, the body of messages that need none.
pub const NIL: [u8; 1] = [0xc0];

/// A message of a rank.
pub enum FromRank {
    /// One that the router takes alone.
    Event(Box<Event<'static, Frames>>),
    /// A batch; its rows are scanned.
    Batch {
        /// Its link.
        from: Peer,
        /// Highest dispatch number that the rank has seen.
        last_dispatch: u64,
        /// Its load, if it told it.
        load: Option<Load>,
        /// The scanned rows, nothing when there are none, or why they can't be read.
        rows: Result<Option<Arc<ScannedBatch>>, String>,
    },
}

impl Rows for ScannedBatch {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn rid(&self, row: usize) -> Rid {
        Rid(self.rid(row))
    }

    fn finished(&self, row: usize) -> bool {
        self.finished(row)
    }
}

/// A batch without rows: the rank only reports its load.
pub struct NoRows;

impl Rows for NoRows {
    fn rows(&self) -> usize {
        0
    }

    fn rid(&self, _row: usize) -> Rid {
        Rid(0)
    }

    fn finished(&self, _row: usize) -> bool {
        false
    }
}

/// Reads a message of a worker.
pub fn from_worker(frames: Frames) -> Event<'static, Frames> {
    let side = Side::Worker;
    let (from, envelope) = match read(side, &frames) {
        Ok(read) => read,
        Err(event) => return *event,
    };
    let (kind, rid, stream) = (envelope.kind, Rid(envelope.id), envelope.flags & FLAG_STREAM != 0);
    match envelope.section {
        Section::Hello { schema } => Event::Hello { side, from, schema, name: name(&envelope) },
        Section::Empty if kind == Kind::Ack => Event::Acknowledge { from, number: envelope.id },
        Section::Empty => Event::Abort { from, rid },
        Section::Request { rank, tokens, .. } => {
            let text = match (kind, envelope.ext(Ext::Text)) {
                // Vectors have no text to be told about.
                (Kind::Embedding, None) => Ok(TextOptions::default()),
                (_, None) => Err("the text extension is missing".to_owned()),
                (_, Some(data)) => match TextOptions::parse(data) {
                    Ok(options) if !options.text && !options.stops.is_empty() => {
                        Err("stop strings are looked for in text, and this request asks for ids alone".to_owned())
                    }
                    parsed => parsed.map_err(|error| error.to_string()),
                },
            };
            let group = envelope.ext(Ext::Group).map(Group::parse).transpose();
            let room = envelope.ext(Ext::Room).map(|data| data.try_into().map(u64::from_le_bytes)).transpose();
            let prefixes = envelope.ext(Ext::PrefixHashes).map_or(Ok(Vec::new()), prefix_hashes);
            let (text, group, room, prefixes) = match (text, group, room, prefixes) {
                (text, Ok(group), Ok(room), Ok(prefixes)) => (text, group, room, prefixes),
                (_, Err(error), _, _) | (_, _, _, Err(error)) => (Err(error.to_string()), None, None, Vec::new()),
                (_, _, Err(_), _) => (Err("the room extension is not 8 bytes".to_owned()), None, None, Vec::new()),
            };
            let bytes = frames.iter().map(|frame| frame.len()).sum();
            let request = Request { rid, rank, tokens, stream, group, room, prefixes, text, bytes, frame: frames };
            Event::Request { from, request }
        }
        Section::Control { rank } if kind == Kind::ControlReply => {
            if rank == worker_party(from.number) {
                Event::Reply { side, from, id: rid, frame: frames }
            } else {
                Event::Malformed { side, reason: format!("a reply in the name of {rank}") }
            }
        }
        Section::Control { .. } => {
            let ask = match kind {
                Kind::GetState => Ask::State,
                Kind::FlushCache => Ask::FlushCache,
                Kind::SetLogLevel => log_level(&frames[1]).map_or_else(
                    || Ask::Refused("the body names no log level: debug, info, warning or error".to_owned()),
                    Ask::LogLevel,
                ),
                Kind::Profile | Kind::Pause | Kind::Continue => Ask::Ranks,
                Kind::AbortRequests => Ask::Workers,
                _ => Ask::Unknown(kind as u16),
            };
            Event::Control { from, id: rid, ask, frame: frames }
        }
        Section::Batch { .. } => unknown(side, from, kind),
    }
}

/// Reads a message of a rank.
pub fn from_rank(mut frames: Frames) -> FromRank {
    let side = Side::Rank;
    let (from, envelope) = match read(side, &frames) {
        Ok(read) => read,
        Err(event) => return FromRank::Event(event),
    };
    let (kind, id) = (envelope.kind, Rid(envelope.id));
    let event = match envelope.section {
        Section::Hello { schema } => Event::Hello { side, from, schema, name: name(&envelope) },
        Section::Batch { rows, last_dispatch, load, .. } if kind != Kind::BatchStr => {
            let rows = match rows {
                0 => Ok(None),
                _ => scan(kind, frames.swap_remove(1), rows as usize).map(Some),
            };
            return FromRank::Batch { from, last_dispatch, load, rows };
        }
        Section::Control { .. } if kind == Kind::ControlReply => Event::Reply { side, from, id, frame: frames },
        Section::Control { .. } if kind == Kind::ActiveRanks => match active_ranks(&frames[1]) {
            Some(active) => Event::ActiveRanks { from, active },
            None => Event::Malformed { side, reason: "body is no ActiveRanksOutput".to_owned() },
        },
        Section::Batch { .. } | Section::Control { .. } | Section::Request { .. } | Section::Empty => {
            unknown(side, from, kind)
        }
    };
    FromRank::Event(Box::new(event))
}

fn read(side: Side, frames: &Frames) -> Result<(Peer, Envelope<'_>), Box<Event<'static, Frames>>> {
    let Some(head) = frames.first() else {
        return Err(Box::new(Event::Malformed { side, reason: "no frames".to_owned() }));
    };
    match Envelope::parse(head) {
        Ok(envelope) if frames.len() >= 2 => Ok((peer(&envelope), envelope)),
        Ok(_) => Err(Box::new(Event::Malformed { side, reason: "no body".to_owned() })),
        Err(WireError::Kind(kind)) => Err(Box::new(match (side, head_of(head)) {
            // Whoever asks something that only a later build knows is told so.
            (Side::Worker, Some((from, id))) => {
                Event::Control { from, id, ask: Ask::Unknown(kind), frame: Frames::new() }
            }
            (_, known) => Event::Unknown { side, number: known.map_or(0, |(from, _)| from.number), kind },
        })),
        Err(error) => Err(Box::new(Event::Malformed { side, reason: error.to_string() })),
    }
}

/// Reads the prefix hashes of a request: u64 each, of which the first so many matter.
pub fn prefix_hashes(data: &[u8]) -> Result<Vec<u64>, WireError> {
    let (hashes, rest) = data.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(WireError::Extension { kind: Ext::PrefixHashes as u16, what: "not a number of whole hashes" });
    }
    Ok(hashes.iter().take(MAX_HASHES).map(|hash| u64::from_le_bytes(*hash)).collect())
}

fn peer(envelope: &Envelope<'_>) -> Peer {
    Peer {
        number: envelope.sender,
        epoch: envelope.sender_epoch,
        receiver_epoch: envelope.receiver_epoch,
        seq: envelope.seq,
    }
}

/// Link and id of an envelope whose kind is not known: they stand in every envelope's head.
fn head_of(head: &[u8]) -> Option<(Peer, Rid)> {
    let from = Peer {
        number: u16::from_le_bytes(*head.get(14..)?.first_chunk()?),
        epoch: u32::from_le_bytes(*head.get(16..)?.first_chunk()?),
        receiver_epoch: u32::from_le_bytes(*head.get(20..)?.first_chunk()?),
        seq: u64::from_le_bytes(*head.get(24..)?.first_chunk()?),
    };
    Some((from, Rid(u64::from_le_bytes(*head.get(32..)?.first_chunk()?))))
}

/// Number of a worker among those that answer control messages; ranks count from 0, this process is -1.
pub fn worker_party(worker: u16) -> i32 {
    -2 - i32::from(worker)
}

fn unknown(side: Side, from: Peer, kind: Kind) -> Event<'static, Frames> {
    Event::Unknown { side, number: from.number, kind: kind as u16 }
}

fn name(envelope: &Envelope<'_>) -> String {
    let text = |ext| envelope.ext(ext).map(String::from_utf8_lossy).unwrap_or_default();
    format!("{}, build {}", text(Ext::Name), text(Ext::Build))
}

fn scan(kind: Kind, body: Message, said: usize) -> Result<Arc<ScannedBatch>, String> {
    // A plain vector, for libzmq is a call away from each look at a frame's bytes.
    let batch = ScannedBatch::parse(kind, Arc::new(body.to_vec())).map_err(|error| error.to_string())?;
    if batch.rows() != said {
        return Err(format!("the envelope says {said} rows, the body has {}", batch.rows()));
    }
    Ok(Arc::new(batch))
}

/// Reads `["SetLogLevelReq", level]`.
fn log_level(body: &[u8]) -> Option<Level> {
    let (&head, name) = body.strip_prefix(b"\x92\xaeSetLogLevelReq")?.split_first()?;
    let name = std::str::from_utf8(name).ok().filter(|name| usize::from(head) == 0xa0 | name.len())?;
    Level::from_name(name)
}

/// Reads `["ActiveRanksOutput", [bool, ...]]`.
fn active_ranks(body: &[u8]) -> Option<Vec<bool>> {
    let rest = body.strip_prefix(b"\x92\xb1ActiveRanksOutput")?;
    let (len, flags) = match *rest {
        [head @ 0x90..=0x9f, ref flags @ ..] => (usize::from(head & 0xf), flags),
        [0xdc, high, low, ref flags @ ..] => (usize::from(u16::from_be_bytes([high, low])), flags),
        _ => return None,
    };
    if flags.len() != len {
        return None;
    }
    flags
        .iter()
        .map(|flag| match flag {
            0xc2 => Some(false),
            0xc3 => Some(true),
            _ => None,
        })
        .collect()
}

/// Makes an envelope of any kind, whoever wrote it, one of this process's link to a peer: sender, both lives, number.
pub fn patch_link(envelope: &mut [u8], sender_epoch: u32, receiver_epoch: u32, seq: u64) {
    if let Some(place) = envelope.get_mut(14..32) {
        place[..2].copy_from_slice(&CONTROL.to_le_bytes());
        place[2..6].copy_from_slice(&sender_epoch.to_le_bytes());
        place[6..10].copy_from_slice(&receiver_epoch.to_le_bytes());
        place[10..].copy_from_slice(&seq.to_le_bytes());
    }
}

/// The first frame on a link.
pub fn hello(epoch: u32, schema: u64, build: &str) -> Vec<u8> {
    EnvelopeBuilder {
        sender_epoch: epoch,
        exts: vec![(Ext::Name as u16, b"servekit::control".to_vec()), (Ext::Build as u16, build.as_bytes().to_vec())],
        ..EnvelopeBuilder::new(Kind::Hello, Section::Hello { schema })
    }
    .encode()
}

/// The end of a request.
pub fn abort(epoch: u32, rid: Rid) -> Vec<u8> {
    EnvelopeBuilder { sender_epoch: epoch, id: rid.0, ..EnvelopeBuilder::new(Kind::Abort, Section::Empty) }.encode()
}

/// Body of an abort, `["AbortReq", rid, ""]`.
pub fn abort_body(rid: Rid) -> Vec<u8> {
    let mut body = b"\x93\xa8AbortReq\xcf".to_vec();
    body.extend_from_slice(&rid.0.to_be_bytes());
    body.push(0xa0);
    body
}

/// A batch for a worker, of rows that come from one rank, or -1 if they come from none.
pub fn batch(epoch: u32, kind: Kind, rank: i32, rows: u32) -> Vec<u8> {
    let section = Section::Batch { rows, rank, last_dispatch: 0, load: None };
    EnvelopeBuilder { sender_epoch: epoch, ..EnvelopeBuilder::new(kind, section) }.encode()
}

/// A batch of one row that ends a request with an error: envelope and body.
///
/// The body is `["BatchTokenIDOutput", [rid], nil, [["error", nil, message, status]]]`.
pub fn failed(epoch: u32, rid: Rid, status: u16, message: &str) -> (Vec<u8>, Vec<u8>) {
    let section = Section::Batch { rows: 1, rank: -1, last_dispatch: 0, load: None };
    let envelope =
        EnvelopeBuilder { sender_epoch: epoch, ..EnvelopeBuilder::new(Kind::BatchTokenId, section) }.encode();
    let mut body = b"\x94\xb2BatchTokenIDOutput\x91\xcf".to_vec();
    body.extend_from_slice(&rid.0.to_be_bytes());
    body.extend_from_slice(b"\xc0\x91\x94\xa5error\xc0\xdb");
    body.extend_from_slice(&(message.len() as u32).to_be_bytes());
    body.extend_from_slice(message.as_bytes());
    body.push(0xcd);
    body.extend_from_slice(&status.to_be_bytes());
    (envelope, body)
}

/// The control process's own answer to a control message: envelope and body.
///
/// The body is `["ControlReply", ok, message, data, asked]`: not obeyed if there is a refusal, which is the message.
pub fn answer(epoch: u32, id: Rid, refusal: Option<&str>, asked: &[i32], data: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let section = Section::Control { rank: -1 };
    let envelope =
        EnvelopeBuilder { sender_epoch: epoch, id: id.0, ..EnvelopeBuilder::new(Kind::ControlReply, section) }.encode();
    let mut body = b"\x95\xacControlReply".to_vec();
    let message = refusal.unwrap_or_default();
    body.extend_from_slice(if refusal.is_none() { b"\xc3\xdb" } else { b"\xc2\xdb" });
    body.extend_from_slice(&(message.len() as u32).to_be_bytes());
    body.extend_from_slice(message.as_bytes());
    body.push(0xc6);
    body.extend_from_slice(&(data.len() as u32).to_be_bytes());
    body.extend_from_slice(data);
    body.push(0xdd);
    body.extend_from_slice(&(asked.len() as u32).to_be_bytes());
    for party in asked {
        body.push(0xd2);
        body.extend_from_slice(&party.to_be_bytes());
    }
    (envelope, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_ranks_are_read_and_anything_else_is_not() {
        let body = |tail: &[u8]| [b"\x92\xb1ActiveRanksOutput".as_slice(), tail].concat();
        assert_eq!(active_ranks(&body(&[0x92, 0xc3, 0xc2])), Some(vec![true, false]));
        assert_eq!(active_ranks(&body(&[0xdc, 0, 1, 0xc3])), Some(vec![true]));
        for wrong in [&[0x92, 0xc3][..], &[0x91, 1], &[0xc0], &[]] {
            assert_eq!(active_ranks(&body(wrong)), None);
        }
        assert_eq!(active_ranks(&NIL), None);
    }

    #[test]
    fn control_messages_are_known_by_what_they_ask_for() {
        let message = |kind, rank, body: &[u8]| {
            let envelope = EnvelopeBuilder::new(kind, Section::Control { rank }).encode();
            from_worker(vec![Message::from(envelope), Message::copy_of(body)])
        };
        let asks = |kind, body: &[u8]| match message(kind, -1, body) {
            Event::Control { ask, .. } => ask,
            _ => panic!("{kind:?} is no control message"),
        };
        assert_eq!(asks(Kind::GetState, &NIL), Ask::State);
        assert_eq!(asks(Kind::FlushCache, &NIL), Ask::FlushCache);
        for kind in [Kind::Profile, Kind::Pause, Kind::Continue] {
            assert_eq!(asks(kind, &NIL), Ask::Ranks);
        }
        assert_eq!(asks(Kind::AbortRequests, &NIL), Ask::Workers);
        assert_eq!(asks(Kind::SetLogLevel, b"\x92\xaeSetLogLevelReq\xa5debug"), Ask::LogLevel(Level::Debug));
        for wrong in [&b"\x92\xaeSetLogLevelReq\xa4loud"[..], b"\x92\xaeSetLogLevelReq\xa6debug", &NIL] {
            assert!(matches!(asks(Kind::SetLogLevel, wrong), Ask::Refused(_)));
        }
        for kind in [Kind::KvEvent, Kind::ActiveRanks, Kind::LoadAdapter] {
            assert_eq!(asks(kind, &NIL), Ask::Unknown(kind as u16));
        }
        assert!(matches!(message(Kind::ControlReply, -2, &NIL), Event::Reply { side: Side::Worker, .. }));
        assert!(matches!(message(Kind::ControlReply, 0, &NIL), Event::Malformed { .. }), "no worker speaks for a rank");
    }

    #[test]
    fn bodies_that_control_writes_are_msgpack_of_their_structs() {
        let (_, body) = answer(1, Rid(7), None, &[0, 300, -2], b"{}");
        let value = rmpv::decode::read_value(&mut &body[..]).unwrap();
        assert_eq!(value.to_string(), r#"["ControlReply", true, "", [123, 125], [0, 300, -2]]"#);
        let (_, body) = answer(1, Rid(7), Some("no"), &[], b"");
        let value = rmpv::decode::read_value(&mut &body[..]).unwrap();
        assert_eq!(value.to_string(), r#"["ControlReply", false, "no", [], []]"#);
        let (_, body) = failed(1, Rid(9), 503, "no");
        assert_eq!(ScannedBatch::parse(Kind::BatchTokenId, Arc::new(body.clone())).unwrap().rids(), [9]);
        let value = rmpv::decode::read_value(&mut &body[..]).unwrap();
        assert_eq!(value.to_string(), r#"["BatchTokenIDOutput", [9], nil, [["error", nil, "no", 503]]]"#);
        let value = rmpv::decode::read_value(&mut &abort_body(Rid(5))[..]).unwrap();
        assert_eq!(value.to_string(), r#"["AbortReq", 5, ""]"#);
    }

    #[test]
    fn what_can_not_be_read_is_told_apart() {
        assert!(matches!(from_worker(vec![]), Event::Malformed { .. }));
        assert!(matches!(from_worker(vec![Message::copy_of(b"x"), Message::new()]), Event::Malformed { .. }));
        let mut bytes = hello(1, 2, "b");
        assert!(matches!(from_worker(vec![Message::copy_of(&bytes)]), Event::Malformed { .. }), "no body");
        bytes[10] = 200;
        let frames = || vec![Message::copy_of(&bytes), Message::copy_of(&NIL)];
        let event = from_worker(frames());
        assert!(matches!(event, Event::Control { from: Peer { epoch: 1, .. }, ask: Ask::Unknown(200), .. }));
        let FromRank::Event(event) = from_rank(frames()) else { panic!("no batch") };
        assert!(matches!(*event, Event::Unknown { kind: 200, .. }));
        let batch = batch(1, Kind::BatchStr, -1, 0);
        let event = from_worker(vec![Message::copy_of(&batch), Message::copy_of(&NIL)]);
        assert!(matches!(event, Event::Unknown { kind: 33, .. }), "a worker sends no batches");
    }
}
