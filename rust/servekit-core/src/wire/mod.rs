//! What the processes say to each other: the envelope, and bodies as far as they are read without decoding.

mod column;
pub mod columns;
pub mod envelope;
mod error;
mod ext;
mod lists;
pub(crate) mod msgpack;
mod pack;
mod rid;
mod scan;
mod tag;

pub use column::{Carry, Column, ColumnKind};
pub use columns::SCHEMA;
pub use envelope::{Envelope, EnvelopeBuilder, Kind, Section, patch_request};
pub use error::WireError;
pub use ext::{Ext, Group, Load, TextOptions};
pub(crate) use lists::{Lists, Places};
pub(crate) use pack::Pack;
pub use rid::{Rid, Route};
pub(crate) use rid::{RidMap, SPREAD};
pub(crate) use scan::{Cells, Tensor};
pub use scan::{FinishType, ScannedBatch};
pub use tag::batch_kind;

/// Bytes of a frame that several threads hold at once.
pub type SharedBytes = std::sync::Arc<dyn AsRef<[u8]> + Send + Sync>;
