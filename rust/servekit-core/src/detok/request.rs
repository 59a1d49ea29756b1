//! One request in a shard.

use crate::wire::columns::batch_token_id as columns;
use crate::wire::msgpack::{Cursor, NIL, write_str};
use crate::wire::{Pack, ScannedBatch, TextOptions};

use super::carried::{Carried, Layout};
use super::decoder::Decoder;
use super::source::{Seen, Source};
use super::stops::Stops;
use super::vocabulary::Vocabulary;

/// How a request ends.
pub(super) enum End {
    /// As the rank says, in the row's finished reason.
    Rank,
    /// A stop string, by the shard.
    Stop(String),
}

/// What is to be sent after a step.
pub(super) struct Step {
    /// Tokens generated, up to the stop.
    pub(super) completion_tokens: u64,
    /// Set in a request's last step.
    pub(super) end: Option<End>,
}

/// State of a request between two steps.
pub(super) struct Request {
    skip_special: bool,
    keep_stop: bool,
    keep_end_token: bool,
    pub(super) want_ids: bool,
    /// Rows are sent as text comes, not only at the end.
    stream: bool,
    decoder: Decoder,
    stops: Option<Stops>,
    /// Text that is not sent yet; UTF-8.
    text: Vec<u8>,
    /// Bytes of text sent.
    sent: u64,
    /// Ids seen.
    pub(super) generated: u64,
    carried: Option<Box<Carried>>,
    pub(super) seen: Seen,
}

impl Request {
    pub(super) fn new(options: &TextOptions, stream: bool) -> Self {
        let stops = Stops::new(&options.stops);
        Self {
            skip_special: options.skip_special_tokens,
            keep_stop: options.include_stop || options.no_stop_trim,
            keep_end_token: options.no_stop_trim,
            want_ids: options.ids,
            stream,
            decoder: Decoder::default(),
            stops,
            text: Vec::new(),
            sent: 0,
            generated: 0,
            carried: options.ids.then(Box::default),
            seen: Seen::default(),
        }
    }

    /// Take a row in; it has carried columns if the source carries.
    ///
    /// # Errors
    /// What is wrong with the row, for the client.
    pub(super) fn step(
        &mut self,
        vocabulary: Option<&Vocabulary>,
        layout: &Layout,
        source: &Source<'_>,
        row: usize,
    ) -> Result<Step, String> {
        let (batch, carries) = (source.batch, source.carries);
        self.seen.update(source, row);
        let ids = decode_ids(batch, row)?;
        if carries && self.carried.is_none() {
            self.carried = Some(Box::default());
        }
        let finished = batch.finished(row);
        // The end token has an id and a count but no text.
        let silent = if finished && !self.keep_end_token { matched_id(batch, row) } else { None };
        let mut stop = None;
        let mut taken = 0;
        for (i, id) in ids.iter().map(|id| u32::from_le_bytes(*id)).enumerate() {
            taken = i + 1;
            let start = self.text.len();
            if let Some(vocabulary) = vocabulary.filter(|_| !(taken == ids.len() && silent == Some(id))) {
                self.decoder.push(vocabulary, id, self.skip_special, &mut self.text)?;
            }
            if let Some(carried) = &mut self.carried {
                carried.push(id, self.sent + (self.text.len() + self.decoder.held()) as u64);
            }
            stop = self.find_stop(start);
            if stop.is_some() {
                break;
            }
        }
        let before = self.generated;
        self.generated += taken as u64;
        let cut = ids.len() - taken;
        if let Some(carried) = self.carried.as_mut().filter(|_| carries) {
            // Columns are aligned with all ids of the row, so those behind the stop count until they are cut.
            ids[taken..].iter().for_each(|id| carried.push(u32::from_le_bytes(*id), u64::MAX));
            carried.push_columns(layout, batch, row, ids.len())?;
            carried.drop_last(cut);
            carried.cut_columns(layout);
        }
        if finished && stop.is_none() {
            let start = self.text.len();
            if let Some(vocabulary) = vocabulary {
                self.decoder.finish(vocabulary, &mut self.text)?;
            }
            stop = self.find_stop(start);
        }
        let said = source.completion_tokens.of_row(batch, row).and_then(|number| u64::try_from(number).ok());
        let all = said.unwrap_or(before + ids.len() as u64);
        let end = match stop {
            Some(stop) => Some(End::Stop(stop)),
            None if finished => Some(End::Rank),
            None => None,
        };
        Ok(Step { completion_tokens: all.saturating_sub(cut as u64), end })
    }

    /// Look for a stop string in the text from `start` on; if there is one, the text ends there.
    fn find_stop(&mut self, start: usize) -> Option<String> {
        let (end, len) = self.stops.as_mut()?.find(&self.text[start..])?;
        let end = start + end;
        let stop = String::from_utf8_lossy(&self.text[end - len..end]).into_owned();
        self.text.truncate(if self.keep_stop { end } else { end - len });
        Some(stop)
    }

    /// Text that may be sent now, in bytes.
    fn sendable(&self, ended: bool) -> usize {
        let held = self.stops.as_ref().map_or(0, Stops::held);
        if ended { self.text.len() } else { self.text.len() - held }
    }

    /// Tokens that go with that much text.
    fn releasable(&self, bytes: usize, ended: bool) -> usize {
        let released =
            |carried: &Carried| if ended { carried.waiting() } else { carried.released(self.sent + bytes as u64) };
        self.carried.as_deref().map_or(0, released)
    }

    /// What a row carries now; None if it has nothing to say.
    pub(super) fn take(&mut self, ended: bool) -> Option<Release<'_>> {
        if !ended && !self.stream {
            return None;
        }
        let bytes = self.sendable(ended);
        let tokens = self.releasable(bytes, ended);
        let says = ended || bytes > 0 || (self.want_ids && tokens > 0);
        says.then_some(Release { request: self, bytes, tokens })
    }

    /// End without a rank's word: the text so far becomes final.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub(super) fn cut_off(&mut self, vocabulary: Option<&Vocabulary>) -> Result<(), String> {
        match vocabulary {
            Some(vocabulary) => self.decoder.finish(vocabulary, &mut self.text),
            None => Ok(()),
        }
    }
}

/// What goes into a row of text; written out once, in this order.
pub(super) struct Release<'a> {
    request: &'a mut Request,
    bytes: usize,
    tokens: usize,
}

impl Release<'_> {
    pub(super) fn write_text(&mut self, out: &mut Pack) {
        let Request { text, sent, .. } = &mut *self.request;
        write_str(out, &text[..self.bytes]);
        if self.bytes == text.len() {
            text.clear();
        } else {
            text.drain(..self.bytes);
        }
        *sent += self.bytes as u64;
    }

    fn carried(&self) -> Option<&Carried> {
        self.request.carried.as_deref()
    }

    /// Whether the client wants ids.
    pub(super) fn has_ids(&self) -> bool {
        self.request.want_ids && self.carried().is_some()
    }

    pub(super) fn write_ids(&mut self, out: &mut Pack) {
        if let Some(carried) = self.carried() {
            carried.write_ids(self.tokens, out);
        }
    }

    /// Whether there may be anything in carried columns.
    pub(super) fn has_columns(&self) -> bool {
        self.carried().is_some_and(Carried::has_columns)
    }

    /// Whether there is anything in column `i` of the layout.
    pub(super) fn has_column(&self, layout: &Layout, i: usize) -> bool {
        self.carried().is_some_and(|carried| carried.in_column(layout, i, self.tokens) > 0)
    }

    pub(super) fn write_column(&mut self, layout: &Layout, i: usize, out: &mut Pack) {
        if let Some(carried) = self.request.carried.as_deref_mut() {
            carried.write_column(layout, i, self.tokens, out);
        }
    }

    /// The row is written.
    pub(super) fn done(self) {
        if let Some(carried) = &mut self.request.carried {
            carried.release(self.tokens);
        }
    }
}

/// New ids of a row.
fn decode_ids(batch: &ScannedBatch, row: usize) -> Result<&[[u8; 4]], String> {
    match batch.element(columns::DECODE_IDS, row) {
        Some([0xc4, len, ids @ ..]) if ids.len() == usize::from(*len) && ids.len() % 4 == 0 => Ok(ids.as_chunks().0),
        None | Some([NIL]) => Ok(&[]),
        Some(item) => match Cursor::new(item).bin().map(<[u8]>::as_chunks::<4>) {
            Ok((ids, [])) => Ok(ids),
            _ => Err("decode_ids of the row are no ids".to_owned()),
        },
    }
}

/// The end token in a finished reason of type stop.
fn matched_id(batch: &ScannedBatch, row: usize) -> Option<u32> {
    let mut cursor = Cursor::new(batch.element(columns::FINISHED_REASONS, row)?);
    let fields = cursor.array().ok()?;
    if fields < 2 || cursor.str().ok()? != b"stop" {
        return None;
    }
    cursor.uint().ok().and_then(|id| u32::try_from(id).ok())
}
