//! What parses as text options or a group is read again as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use servekit_core::wire::{Group, TextOptions};

fuzz_target!(|data: &[u8]| {
    if let Ok(options) = TextOptions::parse(data) {
        assert_eq!(TextOptions::parse(&options.encode()), Ok(options));
    }
    if let Ok(group) = Group::parse(data) {
        assert_eq!(group.encode(), data);
    }
});
