//! Typed extensions of an envelope, and the load report.

use super::WireError;

/// Types of extensions that control reads; it forwards the others untouched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Ext {
    /// Integer, higher is sooner.
    Priority = 1,
    /// Whose request it is.
    Tenant = 2,
    /// Unix time in ms.
    Deadline = 3,
    /// Trace id.
    Trace = 4,
    /// [`Group`].
    Group = 5,
    /// Bootstrap room, u64.
    Room = 6,
    /// Salt of the prefix cache.
    CacheSalt = 7,
    /// Chained hashes of the prompt's prefixes.
    PrefixHashes = 8,
    /// [`TextOptions`].
    Text = 9,
    /// Who speaks, in HELLO.
    Name = 10,
    /// Which build speaks, in HELLO.
    Build = 11,
}

/// A rank's report. Every request with a dispatch number up to the last seen that is not released counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Requests in the batch.
    pub running: u32,
    /// Requests seen and not yet running.
    pub waiting: u32,
    /// KV tokens held by running requests.
    pub held_tokens: u64,
    /// Prompt tokens left to compute.
    pub pending_tokens: u64,
    /// Size of the KV pool in tokens.
    pub pool_tokens: u64,
}

/// Place of a message in a request of several prompts or choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Of the request.
    pub id: u64,
    /// Of this message in it.
    pub index: u32,
    /// Messages in it.
    pub size: u32,
    /// Members with the same number have the same prompt.
    pub prompt: u64,
}

impl Group {
    const SIZE: usize = 24;

    /// Parse the extension's bytes.
    pub fn parse(data: &[u8]) -> Result<Self, WireError> {
        let wrong = || WireError::Extension { kind: Ext::Group as u16, what: "not 24 bytes" };
        if data.len() != Self::SIZE {
            return Err(wrong());
        }
        Ok(Self {
            id: u64_at(data, 0).ok_or_else(wrong)?,
            index: u32_at(data, 8).ok_or_else(wrong)?,
            size: u32_at(data, 12).ok_or_else(wrong)?,
            prompt: u64_at(data, 16).ok_or_else(wrong)?,
        })
    }

    /// The extension's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::SIZE);
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.index.to_le_bytes());
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&self.prompt.to_le_bytes());
        out
    }
}

const INCLUDE_STOP: u8 = 1;
const SKIP_SPECIAL: u8 = 2;
const TEXT: u8 = 4;
const IDS: u8 = 8;
const NO_STOP_TRIM: u8 = 16;

/// What the detokenizer shard must know of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextOptions {
    /// Strings that end the text; empty ones match nothing.
    pub stops: Vec<String>,
    /// A matched stop string stays in the text.
    pub include_stop: bool,
    /// Special tokens have no text.
    pub skip_special_tokens: bool,
    /// The client wants text.
    pub text: bool,
    /// The client wants ids.
    pub ids: bool,
    /// Stop strings and the final end token stay in the text.
    pub no_stop_trim: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            stops: Vec::new(),
            include_stop: false,
            skip_special_tokens: true,
            text: true,
            ids: false,
            no_stop_trim: false,
        }
    }
}

impl TextOptions {
    /// Parse the extension's bytes: u8 wants, u8 zero, u16 stops, then per stop u32 length and UTF-8.
    pub fn parse(data: &[u8]) -> Result<Self, WireError> {
        let wrong = |what| WireError::Extension { kind: Ext::Text as u16, what };
        let (&[wants, _, low, high], mut rest) = data.split_first_chunk::<4>().ok_or_else(|| wrong("truncated"))?;
        let mut stops = Vec::new();
        for _ in 0..u16::from_le_bytes([low, high]) {
            let (size, after) = rest.split_first_chunk::<4>().ok_or_else(|| wrong("truncated"))?;
            let size = u32::from_le_bytes(*size) as usize;
            let stop = after.get(..size).ok_or_else(|| wrong("stop string goes beyond it"))?;
            stops.push(std::str::from_utf8(stop).map_err(|_| wrong("stop string is not UTF-8"))?.to_owned());
            rest = &after[size..];
        }
        if !rest.is_empty() {
            return Err(wrong("bytes left over"));
        }
        Ok(Self {
            stops,
            include_stop: wants & INCLUDE_STOP != 0,
            skip_special_tokens: wants & SKIP_SPECIAL != 0,
            text: wants & TEXT != 0,
            ids: wants & IDS != 0,
            no_stop_trim: wants & NO_STOP_TRIM != 0,
        })
    }

    /// The extension's bytes; at most 65535 stop strings are kept.
    pub fn encode(&self) -> Vec<u8> {
        let stops = &self.stops[..self.stops.len().min(usize::from(u16::MAX))];
        let flag = |on: bool, bit: u8| if on { bit } else { 0 };
        let wants = flag(self.include_stop, INCLUDE_STOP)
            | flag(self.skip_special_tokens, SKIP_SPECIAL)
            | flag(self.text, TEXT)
            | flag(self.ids, IDS)
            | flag(self.no_stop_trim, NO_STOP_TRIM);
        let mut out = vec![wants, 0];
        out.extend_from_slice(&(stops.len() as u16).to_le_bytes());
        for stop in stops {
            out.extend_from_slice(&(stop.len() as u32).to_le_bytes());
            out.extend_from_slice(stop.as_bytes());
        }
        out
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|b| u16::from_le_bytes(*b))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|b| u32::from_le_bytes(*b))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|b| u64::from_le_bytes(*b))
}
