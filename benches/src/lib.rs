//! Frames for the benches.
