//! Server-sent events of text streams: the rows of a batch become bytes to write, without decoding the batch.

mod escape;
mod streams;
mod template;

pub use escape::escape_json;
pub use streams::{Tally, TextStreams};
pub use template::Template;

#[cfg(test)]
mod tests;
