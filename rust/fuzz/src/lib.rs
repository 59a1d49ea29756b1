//! What may be done with any bytes at all. `cargo fuzz` looks for bytes that make one of these panic, from those that were
//! worth keeping (`seeds/`) on.
#![expect(clippy::unwrap_used, reason = "a panic is what the fuzzer looks for")]

pub mod detok;
pub mod detok_text;
pub mod envelope;
pub mod frames;
pub mod scan_split;
pub mod text_options;

/// A check of one part.
pub type Target = fn(&[u8]);

/// Each check by its name, which is that of its folder in `seeds/`.
pub const TARGETS: [(&str, Target); 6] = [
    ("detok", detok::run),
    ("detok_text", detok_text::run),
    ("envelope", envelope::run),
    ("frames", frames::run),
    ("scan_split", scan_split::run),
    ("text_options", text_options::run),
];
