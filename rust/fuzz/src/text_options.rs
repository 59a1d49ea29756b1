//! What parses as text options or a group is read again as the same.

use servekit_core::wire::{Group, TextOptions};

/// Takes any bytes.
///
/// # Panics
/// They show a fault.
pub fn run(data: &[u8]) {
    if let Ok(options) = TextOptions::parse(data) {
        assert_eq!(TextOptions::parse(&options.encode()), Ok(options));
    }
    if let Ok(group) = Group::parse(data) {
        assert_eq!(group.encode(), data);
    }
}
