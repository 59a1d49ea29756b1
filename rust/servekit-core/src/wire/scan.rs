//! A batch of which is known where each element of each column starts and ends, without decoding any.

use std::ops::Range;

use super::column::{Column, ColumnKind};
use super::columns::{batch_embedding, batch_str, batch_token_id};
use super::lists::{Lists, Places};
use super::msgpack::{Broken, Cursor};
use super::{Kind, SharedBytes, WireError};

/// Type of a finished row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishType {
    /// An end token or a stop string.
    Stop,
    /// The limit of tokens.
    Length,
    /// Aborted by the client or the server.
    Abort,
    /// Failed.
    Error,
    /// One that this build does not know.
    Other,
}

/// A tensor whose first dimension is the batch's rows.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// The name of its type, as an item.
    pub(crate) dtype: Range<usize>,
    /// Dimensions after the first.
    pub(crate) shape: Vec<u64>,
    /// Where the first row's data starts.
    pub(crate) data: usize,
    /// Bytes a row.
    pub(crate) stride: usize,
}

/// What a column holds.
#[derive(Debug, Clone)]
pub(crate) enum Cells {
    Absent,
    List(Lists),
    /// Key, as an item, and its list.
    Dict(Vec<(Range<usize>, Lists)>),
    Stacked(Box<Tensor>),
    Shared(Range<usize>),
}

/// A scanned body. It holds its bytes; clones share them.
#[derive(Clone)]
pub struct ScannedBatch {
    kind: Kind,
    bytes: SharedBytes,
    rids: Vec<u64>,
    cells: Vec<Cells>,
    ranges: Vec<(u32, u32)>,
}

impl ScannedBatch {
    /// Scan a body.
    ///
    /// # Errors
    /// The kind is no batch's, the body is no msgpack of this kind, a column that is there has not the length that its
    /// kind asks for, or it has more columns than this build knows: those could not be split.
    pub fn parse(kind: Kind, bytes: SharedBytes) -> Result<Self, WireError> {
        let columns = columns_of(kind).ok_or(WireError::Kind(kind as u16))?;
        let body = (*bytes).as_ref();
        let mut scan = Scan { cursor: Cursor::new(body), ranges: Vec::new(), rows: 0 };
        let (rids, cells) =
            scan.body(columns, tag_of(kind)).map_err(|(column, (at, what))| WireError::Body { column, at, what })?;
        let ranges = scan.ranges;
        Ok(Self { kind, bytes, rids, cells, ranges })
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of requests in it.
    pub fn rows(&self) -> usize {
        self.rids.len()
    }

    /// Request ids, one a row.
    pub fn rids(&self) -> &[u64] {
        &self.rids
    }

    /// Request id of a row.
    ///
    /// # Panics
    /// There is no such row.
    pub fn rid(&self, row: usize) -> u64 {
        self.rids[row]
    }

    /// Whether the row ends its request.
    #[inline]
    pub fn finished(&self, row: usize) -> bool {
        // `finished_reasons` stands at the same place in every kind.
        self.element(batch_token_id::FINISHED_REASONS, row).is_some_and(|item| item.first() != Some(&0xc0))
    }

    /// How the row ends its request, if it does.
    pub fn finish_type(&self, row: usize) -> Option<FinishType> {
        let item = self.element(batch_token_id::FINISHED_REASONS, row).filter(|item| *item != [0xc0])?;
        let mut cursor = Cursor::new(item);
        let name = cursor.array().and_then(|_| cursor.str());
        Some(match name {
            Ok(b"stop") => FinishType::Stop,
            Ok(b"length") => FinishType::Length,
            Ok(b"abort") => FinishType::Abort,
            Ok(b"error") => FinishType::Error,
            _ => FinishType::Other,
        })
    }

    /// Bytes of the element of a column of one item a row; None if the column is absent, shorter or of another shape.
    #[inline]
    pub fn element(&self, column: usize, row: usize) -> Option<&[u8]> {
        match self.cells.get(column) {
            Some(Cells::List(list)) if row < list.len => Some(&self.body()[self.range(*list, row)]),
            _ => None,
        }
    }

    /// The whole body.
    pub fn body(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }

    /// The body as it is shared.
    pub fn shared(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Columns of its kind; the body may have fewer.
    pub fn columns(&self) -> &'static [Column] {
        columns_of(self.kind).unwrap_or_default()
    }

    /// Place of a column by its name.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns().iter().position(|column| column.name == name)
    }

    pub(crate) fn tag(&self) -> &'static str {
        tag_of(self.kind)
    }

    /// One for each column that the body has.
    pub(crate) fn cells(&self) -> &[Cells] {
        &self.cells
    }

    /// Where an element of a list lies in the body.
    #[inline]
    pub(crate) fn range(&self, list: Lists, row: usize) -> Range<usize> {
        match list.places {
            Places::Even { start, size } => start + size * row..start + size * (row + 1),
            Places::Same { start } => start + row..start + row + 1,
            Places::Mixed { .. } => {
                let (start, end) = self.ranges(list)[row];
                start as usize..end as usize
            }
        }
    }

    /// Where each element of a list lies whose elements differ in size.
    #[inline]
    pub(crate) fn ranges(&self, list: Lists) -> &[(u32, u32)] {
        match list.places {
            Places::Mixed { first } => &self.ranges[first..first + list.len],
            Places::Even { .. } | Places::Same { .. } => &[],
        }
    }
}

impl std::fmt::Debug for ScannedBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ScannedBatch({:?}, {} rows, {} bytes)", self.kind, self.rows(), self.body().len())
    }
}

/// Columns of a kind of batch; None for other kinds.
pub(crate) fn columns_of(kind: Kind) -> Option<&'static [Column]> {
    match kind {
        Kind::BatchTokenId => Some(batch_token_id::COLUMNS),
        Kind::BatchStr => Some(batch_str::COLUMNS),
        Kind::BatchEmbedding => Some(batch_embedding::COLUMNS),
        _ => None,
    }
}

/// First element of a body of that kind.
pub(crate) fn tag_of(kind: Kind) -> &'static str {
    match kind {
        Kind::BatchTokenId => batch_token_id::TAG,
        Kind::BatchStr => batch_str::TAG,
        _ => batch_embedding::TAG,
    }
}

type InColumn<T> = Result<T, (&'static str, Broken)>;

struct Scan<'a> {
    cursor: Cursor<'a>,
    ranges: Vec<(u32, u32)>,
    rows: usize,
}

impl Scan<'_> {
    fn body(&mut self, columns: &'static [Column], tag: &str) -> InColumn<(Vec<u64>, Vec<Cells>)> {
        let outside = |broken| ("-", broken);
        if u32::try_from(self.cursor.bytes.len()).is_err() {
            return Err(outside((0, "body of 4 GiB or more")));
        }
        let fields = self.cursor.array().map_err(outside)?;
        let start = self.cursor.at;
        if self.cursor.str().map_err(outside)? != tag.as_bytes() {
            return Err(outside((start, "tag of another kind")));
        }
        if fields < 2 || fields - 1 > columns.len() {
            return Err(outside((0, "number of columns")));
        }
        let (rids, list) = self.rids().map_err(|broken| ("rids", broken))?;
        let mut cells = Vec::with_capacity(fields - 1);
        cells.push(Cells::List(list));
        for column in &columns[1..fields - 1] {
            let cell = self.column(column).map_err(|broken| (column.name, broken))?;
            cells.push(cell);
        }
        if !self.cursor.at_end() {
            return Err(outside((self.cursor.at, "bytes left over")));
        }
        Ok((rids, cells))
    }

    fn rids(&mut self) -> Result<(Vec<u64>, Lists), Broken> {
        self.rows = self.cursor.array()?;
        let start = self.cursor.at;
        let list = self.list(self.rows)?;
        let (items, _) = self.cursor.bytes[start..self.cursor.at].as_chunks::<9>();
        if list.places == (Places::Even { start, size: 9 }) && items.iter().all(|item| item[0] == 0xcf) {
            let rid = |[_, number @ ..]: &[u8; 9]| u64::from_be_bytes(*number);
            return Ok((items.iter().map(rid).collect(), list));
        }
        let mut cursor = Cursor { at: start, ..self.cursor };
        let rids = (0..self.rows).map(|_| cursor.uint()).collect::<Result<_, _>>()?;
        Ok((rids, list))
    }

    fn column(&mut self, column: &Column) -> Result<Cells, Broken> {
        if self.cursor.nil()? {
            return Ok(Cells::Absent);
        }
        let start = self.cursor.at;
        let wrong = Err((start, "length differs from the batch's"));
        match column.kind {
            ColumnKind::Shared => {
                self.cursor.skip()?;
                Ok(Cells::Shared(start..self.cursor.at))
            }
            ColumnKind::Stacked => self.tensor(),
            ColumnKind::DictOfLists => self.dict(),
            ColumnKind::ListOrStacked if !matches!(self.cursor.peek()?, 0x90..=0x9f | 0xdc | 0xdd) => self.tensor(),
            kind => {
                let len = self.cursor.array()?;
                let fits = match kind {
                    ColumnKind::RaggedShort | ColumnKind::NestedShort => len <= self.rows,
                    ColumnKind::ListOrEmpty => len == self.rows || len == 0,
                    _ => len == self.rows,
                };
                if !fits {
                    return wrong;
                }
                let start = self.cursor.at;
                let list = self.list(len)?;
                if column.name == "finished_reasons" {
                    self.check_reasons(start, list)?;
                }
                Ok(Cells::List(list))
            }
        }
    }

    /// Pass the items of a list whose head is read.
    fn list(&mut self, len: usize) -> Result<Lists, Broken> {
        Lists::scan(&mut self.cursor, len, &mut self.ranges)
    }

    /// A reason is nil or an array that starts with a text: readers of the row rely on it.
    fn check_reasons(&self, start: usize, list: Lists) -> Result<(), Broken> {
        let mut cursor = Cursor { at: start, ..self.cursor };
        if matches!(list.places, Places::Same { .. }) && cursor.nil()? {
            return Ok(());
        }
        for _ in 0..list.len {
            let start = cursor.at;
            let mut item = cursor;
            cursor.skip()?;
            if !item.nil()? {
                if item.array()? == 0 {
                    return Err((start, "reason without a type"));
                }
                item.str()?;
            }
        }
        Ok(())
    }

    fn dict(&mut self) -> Result<Cells, Broken> {
        let keys = self.cursor.map()?;
        let mut lists = Vec::new();
        for _ in 0..keys {
            let start = self.cursor.at;
            self.cursor.str()?;
            let key = start..self.cursor.at;
            let len = self.cursor.array()?;
            if len > self.rows {
                return Err((key.end, "list is longer than the batch"));
            }
            lists.push((key, self.list(len)?));
        }
        Ok(Cells::Dict(lists))
    }

    fn tensor(&mut self) -> Result<Cells, Broken> {
        let start = self.cursor.at;
        let (mut dtype, mut shape, mut data) = (None, None, None);
        for _ in 0..self.cursor.map()? {
            match self.cursor.str()? {
                b"dtype" => {
                    let start = self.cursor.at;
                    let bytes = match self.cursor.str()? {
                        b"f32" => 4,
                        b"f16" | b"bf16" => 2,
                        b"i64" => 8_u64,
                        _ => return Err((start, "unknown dtype")),
                    };
                    dtype = Some((start..self.cursor.at, bytes));
                }
                b"shape" => {
                    let dimensions = self.cursor.array()?;
                    shape = Some((0..dimensions).map(|_| self.cursor.uint()).collect::<Result<Vec<_>, _>>()?);
                }
                b"data" => {
                    let len = self.cursor.bin()?.len();
                    data = Some(self.cursor.at - len..self.cursor.at);
                }
                _ => return Err((start, "a tensor is dtype, shape and data")),
            }
        }
        let (Some((dtype, bytes)), Some(shape), Some(data)) = (dtype, shape, data) else {
            return Err((start, "a tensor is dtype, shape and data"));
        };
        let Some((&rows, rest)) = shape.split_first() else {
            return Err((start, "tensor without dimensions"));
        };
        let stride = rest.iter().try_fold(bytes, |product, &n| product.checked_mul(n));
        let Some(stride) = stride.filter(|stride| stride.checked_mul(rows) == Some(data.len() as u64)) else {
            return Err((start, "shape does not fit the data"));
        };
        if rows != self.rows as u64 {
            return Err((start, "length differs from the batch's"));
        }
        Ok(Cells::Stacked(Box::new(Tensor { dtype, shape: rest.to_vec(), data: data.start, stride: stride as usize })))
    }
}

#[cfg(test)]
mod tests;
