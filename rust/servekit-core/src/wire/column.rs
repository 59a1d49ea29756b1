//! Kinds of columns; `python/servekit/messages/columns.py` says which column is of which kind.

/// Shape of a column in a batch of n rows. Any column may be absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnKind {
    /// One element a row.
    List,
    /// One element a row, or none at all.
    ListOrEmpty,
    /// One `bin` of 4-byte numbers a row.
    Ragged,
    /// As `Ragged`; elements may be nil and rows may be missing at the end.
    RaggedShort,
    /// One array a row.
    Nested,
    /// As `Nested`; elements may be nil and rows may be missing at the end.
    NestedShort,
    /// A map of lists; rows may be missing at the end of each.
    DictOfLists,
    /// One tensor whose first dimension is n.
    Stacked,
    /// A list or a stacked tensor.
    ListOrStacked,
    /// One value for all rows.
    Shared,
}

/// What a row of text gets of a column, when it stands for several steps of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carry {
    /// The value of the newest step.
    Newest,
    /// The detokenizer makes it.
    Own,
    /// One item for each id, released and cut together with the ids.
    PerToken,
    /// All items so far.
    Appended,
    /// The first value, with the first row that is sent.
    Once,
}

/// One column of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Name of the field.
    pub name: &'static str,
    /// How it is split.
    pub kind: ColumnKind,
    /// How the detokenizer carries it.
    pub carry: Carry,
}

/// A column; short, because the generated tables consist of these.
pub(super) const fn column(name: &'static str, kind: ColumnKind, carry: Carry) -> Column {
    Column { name, kind, carry }
}
