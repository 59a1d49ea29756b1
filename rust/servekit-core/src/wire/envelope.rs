//! The envelope: the first frame of every message, and all that the control process reads of one.
//!
//! `python/servekit/messages/envelope.py` is the twin of this file and shows the layout; both are held to the golden
//! frames in `tests/data/`.

use super::WireError;
use super::ext::{Ext, Load, u16_at, u32_at, u64_at};

/// `SVK1`, little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"SVK1");
/// Schema version that this build speaks.
pub const VERSION: u16 = 1;
/// The batch section holds a load report.
pub const FLAG_LOAD: u16 = 1;
/// A request whose client reads text as it comes.
pub const FLAG_STREAM: u16 = 2;

const HEAD: usize = 40;
const REQUEST: usize = 24;
const BATCH: usize = 48;
const CONTROL: usize = 8;
const HELLO: usize = 8;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// What a message is. The numbers are the wire's; gaps leave room within a family.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Kind {
            $($(#[$doc])* $name = $value,)*
        }

        impl TryFrom<u16> for Kind {
            type Error = WireError;

            fn try_from(value: u16) -> Result<Self, WireError> {
                match value {
                    $($value => Ok(Self::$name),)*
                    _ => Err(WireError::Kind(value)),
                }
            }
        }
    };
}

kinds! {
    /// First frame each way on a link.
    Hello = 1,
    /// What a worker has handled.
    Ack = 2,
    /// `TokenizedGenerateReqInput`.
    Generate = 16,
    /// `TokenizedEmbeddingReqInput`.
    Embedding = 17,
    /// `AbortReq`.
    Abort = 18,
    /// `BatchTokenIDOutput`.
    BatchTokenId = 32,
    /// `BatchStrOutput`.
    BatchStr = 33,
    /// `BatchEmbeddingOutput`.
    BatchEmbedding = 34,
    /// `ProfileReq`.
    Profile = 48,
    /// `FlushCacheReq`.
    FlushCache = 49,
    /// `PauseReq`.
    Pause = 50,
    /// `ContinueReq`.
    Continue = 51,
    /// `SetLogLevelReq`.
    SetLogLevel = 52,
    /// `GetStateReq`.
    GetState = 53,
    /// `ActiveRanksOutput`.
    ActiveRanks = 54,
    /// `AbortRequestsReq`.
    AbortRequests = 55,
    /// `ControlReply`.
    ControlReply = 63,
    /// Reserved.
    KvEvent = 80,
    /// Reserved.
    LoadAdapter = 81,
    /// Reserved.
    UnloadAdapter = 82,
}

impl Kind {
    /// A request for a rank that the router dispatches.
    pub fn is_request(self) -> bool {
        matches!(self, Self::Generate | Self::Embedding)
    }

    /// A batch of rows that is split.
    pub fn is_batch(self) -> bool {
        matches!(self, Self::BatchTokenId | Self::BatchStr | Self::BatchEmbedding)
    }
}

/// The part of an envelope that depends on its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// Of GENERATE and EMBEDDING.
    Request {
        /// Named by the client or chosen by the router, -1 for none.
        rank: i32,
        /// Estimated tokens of work: the prompt's length.
        tokens: u32,
        /// Which try at the request this is, from 1; 0 before the router.
        attempt: u32,
        /// Number of the dispatch to the rank; 0 before the router.
        dispatch: u64,
    },
    /// Of batches.
    Batch {
        /// Requests in it.
        rows: u32,
        /// Whose it is.
        rank: i32,
        /// Highest dispatch number that the rank has seen.
        last_dispatch: u64,
        /// The rank's report, if the frame has one.
        load: Option<Load>,
    },
    /// Of control messages and their replies.
    Control {
        /// Whom it concerns, -1 for all or for control itself.
        rank: i32,
    },
    /// Of HELLO.
    Hello {
        /// Hash of the speaker's message definitions.
        schema: u64,
    },
    /// Of ACK and ABORT: nothing.
    Empty,
}

impl Section {
    fn size(kind: Kind) -> usize {
        match kind {
            Kind::Hello => HELLO,
            Kind::Ack | Kind::Abort => 0,
            kind if kind.is_request() => REQUEST,
            kind if kind.is_batch() => BATCH,
            _ => CONTROL,
        }
    }

    fn parse(kind: Kind, flags: u16, at: &[u8]) -> Option<Self> {
        let i32_at = |offset| u32_at(at, offset).map(u32::cast_signed);
        Some(match kind {
            Kind::Hello => Self::Hello { schema: u64_at(at, 0)? },
            Kind::Ack | Kind::Abort => Self::Empty,
            kind if kind.is_request() => Self::Request {
                rank: i32_at(0)?,
                tokens: u32_at(at, 4)?,
                attempt: u32_at(at, 8)?,
                dispatch: u64_at(at, 16)?,
            },
            kind if kind.is_batch() => Self::Batch {
                rows: u32_at(at, 0)?,
                rank: i32_at(4)?,
                last_dispatch: u64_at(at, 8)?,
                load: if flags & FLAG_LOAD == 0 {
                    None
                } else {
                    Some(Load {
                        running: u32_at(at, 16)?,
                        waiting: u32_at(at, 20)?,
                        held_tokens: u64_at(at, 24)?,
                        pending_tokens: u64_at(at, 32)?,
                        pool_tokens: u64_at(at, 40)?,
                    })
                },
            },
            _ => Self::Control { rank: i32_at(0)? },
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Hello { schema } => out.extend_from_slice(&schema.to_le_bytes()),
            Self::Empty => {}
            Self::Request { rank, tokens, attempt, dispatch } => {
                out.extend_from_slice(&rank.to_le_bytes());
                out.extend_from_slice(&tokens.to_le_bytes());
                out.extend_from_slice(&attempt.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
                out.extend_from_slice(&dispatch.to_le_bytes());
            }
            Self::Batch { rows, rank, last_dispatch, load } => {
                let load = load.unwrap_or_default();
                out.extend_from_slice(&rows.to_le_bytes());
                out.extend_from_slice(&rank.to_le_bytes());
                out.extend_from_slice(&last_dispatch.to_le_bytes());
                out.extend_from_slice(&load.running.to_le_bytes());
                out.extend_from_slice(&load.waiting.to_le_bytes());
                out.extend_from_slice(&load.held_tokens.to_le_bytes());
                out.extend_from_slice(&load.pending_tokens.to_le_bytes());
                out.extend_from_slice(&load.pool_tokens.to_le_bytes());
            }
            Self::Control { rank } => {
                out.extend_from_slice(&rank.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
            }
        }
    }
}

/// A parsed envelope; its extensions stay in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// What the message is.
    pub kind: Kind,
    /// `FLAG_*`.
    pub flags: u16,
    /// Worker number, rank, or 0 for control.
    pub sender: u16,
    /// Life of the sender.
    pub sender_epoch: u32,
    /// Life of the receiver that it is meant for; 0 means any.
    pub receiver_epoch: u32,
    /// Number of the frame on its link, from 1.
    pub seq: u64,
    /// Request id, correlation id, step number or number of the last frame handled, by kind.
    pub id: u64,
    /// By kind.
    pub section: Section,
    exts: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Parse and check a whole frame, extensions included.
    pub fn parse(frame: &'a [u8]) -> Result<Self, WireError> {
        let short = |need| WireError::Short { need, got: frame.len() };
        let need = || short(HEAD);
        let said = u32_at(frame, 0).ok_or_else(need)?;
        if frame.len() < HEAD {
            return Err(need());
        }
        let magic = u32_at(frame, 4).ok_or_else(need)?;
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        let version = u16_at(frame, 8).ok_or_else(need)?;
        if version != VERSION {
            return Err(WireError::Version(version));
        }
        if said as usize != frame.len() {
            return Err(WireError::Length { said, got: frame.len() });
        }
        let kind = Kind::try_from(u16_at(frame, 10).ok_or_else(need)?)?;
        let flags = u16_at(frame, 12).ok_or_else(need)?;
        let end = HEAD + Section::size(kind);
        if frame.len() < end {
            return Err(short(end));
        }
        let section = Section::parse(kind, flags, &frame[HEAD..end]).ok_or_else(|| short(end))?;
        let envelope = Self {
            kind,
            flags,
            sender: u16_at(frame, 14).ok_or_else(need)?,
            sender_epoch: u32_at(frame, 16).ok_or_else(need)?,
            receiver_epoch: u32_at(frame, 20).ok_or_else(need)?,
            seq: u64_at(frame, 24).ok_or_else(need)?,
            id: u64_at(frame, 32).ok_or_else(need)?,
            section,
            exts: &frame[end..],
        };
        let mut rest = envelope.exts;
        while !rest.is_empty() {
            let (_, _, after) = next_ext(rest)?;
            rest = after;
        }
        Ok(envelope)
    }

    /// Type and bytes of each extension, in order.
    pub fn exts(&self) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        let mut rest = self.exts;
        std::iter::from_fn(move || {
            let (kind, data, after) = next_ext(rest).ok()?;
            rest = after;
            Some((kind, data))
        })
    }

    /// Bytes of the first extension of a type.
    pub fn ext(&self, ext: Ext) -> Option<&'a [u8]> {
        self.exts().find(|(kind, _)| *kind == ext as u16).map(|(_, data)| data)
    }
}

fn next_ext(rest: &[u8]) -> Result<(u16, &[u8], &[u8]), WireError> {
    let kind = u16_at(rest, 0).unwrap_or(0);
    let size = u32_at(rest, 4).ok_or(WireError::Extension { kind, what: "truncated" })? as usize;
    let data = rest[8..].get(..size).ok_or(WireError::Extension { kind, what: "goes beyond the frame" })?;
    Ok((kind, data, &rest[8 + size..]))
}

/// An envelope to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvelopeBuilder {
    /// What the message is; must fit the section.
    pub kind: Kind,
    /// `FLAG_*`; `FLAG_LOAD` follows the section.
    pub flags: u16,
    /// Worker number, rank, or 0 for control.
    pub sender: u16,
    /// Life of the sender.
    pub sender_epoch: u32,
    /// Life of the receiver that it is meant for; 0 means any.
    pub receiver_epoch: u32,
    /// Number of the frame on its link, from 1.
    pub seq: u64,
    /// Request id, correlation id or step number, by kind.
    pub id: u64,
    /// By kind.
    pub section: Section,
    /// Type and bytes of each extension.
    pub exts: Vec<(u16, Vec<u8>)>,
}

impl EnvelopeBuilder {
    /// An envelope with nothing but a kind and its section.
    pub fn new(kind: Kind, section: Section) -> Self {
        Self { kind, flags: 0, sender: 0, sender_epoch: 0, receiver_epoch: 0, seq: 0, id: 0, section, exts: Vec::new() }
    }

    /// The frame's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut flags = self.flags & !FLAG_LOAD;
        if matches!(self.section, Section::Batch { load: Some(_), .. }) {
            flags |= FLAG_LOAD;
        }
        let mut out =
            Vec::with_capacity(HEAD + BATCH + self.exts.iter().map(|(_, data)| 8 + data.len()).sum::<usize>());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(self.kind as u16).to_le_bytes());
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&self.sender.to_le_bytes());
        out.extend_from_slice(&self.sender_epoch.to_le_bytes());
        out.extend_from_slice(&self.receiver_epoch.to_le_bytes());
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        self.section.encode(&mut out);
        for (kind, data) in &self.exts {
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(&[0; 2]);
            out.extend_from_slice(&(data.len() as u32).to_le_bytes());
            out.extend_from_slice(data);
        }
        let length = (out.len() as u32).to_le_bytes();
        out[..4].copy_from_slice(&length);
        out
    }
}

/// Write what the router decides into a request's envelope.
///
/// Returns whether it did: false, and nothing written, if the frame is too short to hold a request's section.
pub fn patch_request(frame: &mut [u8], rank: i32, attempt: u32, dispatch: u64, receiver_epoch: u32, seq: u64) -> bool {
    if frame.len() < HEAD + REQUEST {
        return false;
    }
    frame[20..24].copy_from_slice(&receiver_epoch.to_le_bytes());
    frame[24..32].copy_from_slice(&seq.to_le_bytes());
    frame[HEAD..HEAD + 4].copy_from_slice(&rank.to_le_bytes());
    frame[HEAD + 8..HEAD + 12].copy_from_slice(&attempt.to_le_bytes());
    frame[HEAD + 16..HEAD + 24].copy_from_slice(&dispatch.to_le_bytes());
    true
}
