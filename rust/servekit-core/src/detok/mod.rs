//! The incremental detokenizer: token ids in, complete characters out, stop strings matched.
//!
//! A [`Shard`] holds the state of its requests, [`Vocabulary`] what all of them share. The pieces of a request add up to
//! the tokenizer's decoding of all its ids, whatever the steps they came in.

mod carried;
mod decoder;
mod output;
mod request;
mod shard;
mod source;
mod stops;
mod table;
mod vocabulary;

pub use output::{Body, ShardOutput, WorkerFrame};
pub use shard::{Counts, Shard, shard_of};
pub(crate) use table::byte_of;
pub use vocabulary::{Vocabulary, VocabularyError};

#[cfg(test)]
mod tests;
