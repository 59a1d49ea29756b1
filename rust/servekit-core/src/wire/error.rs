//! What can be wrong with bytes from a peer.

/// Why bytes are no frame of this schema version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The frame ends before its fixed part does.
    #[error("frame of {got} bytes is shorter than the {need} it needs")]
    Short {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        got: usize,
    },
    /// Another protocol.
    #[error("magic is {0:#x}")]
    Magic(u32),
    /// Another version of this protocol.
    #[error("schema version is {0}, this build speaks {version}", version = super::envelope::VERSION)]
    Version(u16),
    /// Length field and frame disagree.
    #[error("length field says {said}, frame has {got} bytes")]
    Length {
        /// What the field says.
        said: u32,
        /// Bytes there.
        got: usize,
    },
    /// A kind that this build does not know, or that can't stand here.
    #[error("unknown or unexpected kind {0}")]
    Kind(u16),
    /// An extension that is cut off or whose content is broken.
    #[error("extension {kind}: {what}")]
    Extension {
        /// Its type.
        kind: u16,
        /// What is wrong.
        what: &'static str,
    },
    /// A body that is no batch of its kind.
    #[error("malformed body, column {column}, byte {at}: {what}")]
    Body {
        /// Name of the column, or `-` outside of one.
        column: &'static str,
        /// Where in the body.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// A row that the batch does not have.
    #[error("row {row} of a batch of {rows}")]
    Row {
        /// What was asked for.
        row: usize,
        /// Rows there.
        rows: usize,
    },
    /// A column that the batch does not have.
    #[error("no column {0}")]
    Column(String),
    /// Batches that can't be merged.
    #[error("can't merge column {column}: {what}")]
    Merge {
        /// Name of the column, or `-` for the batches as such.
        column: &'static str,
        /// What is wrong.
        what: &'static str,
    },
}
