//! The name that stands first in a body.

use super::msgpack::Cursor;
use super::scan::tag_of;
use super::{Kind, WireError};

/// Which kind of batch a body is, by the name in it.
///
/// # Errors
/// It begins as none.
pub fn batch_kind(body: &[u8]) -> Result<Kind, WireError> {
    let mut cursor = Cursor::new(body);
    let name = cursor.array().and_then(|_| cursor.str());
    let name = name.map_err(|(at, what)| WireError::Body { column: "-", at, what })?;
    [Kind::BatchTokenId, Kind::BatchStr, Kind::BatchEmbedding]
        .into_iter()
        .find(|kind| tag_of(*kind).as_bytes() == name)
        .ok_or(WireError::Body { column: "-", at: 0, what: "no batch has this name" })
}
