//! The router: what it decides (`core`), without I/O, and how frames become its events (`frames`).

mod core;
mod event;
pub mod frames;
mod groups;
mod link;

pub use core::{Core, CoreConfig, RankView};
pub use event::{Action, Ask, Event, Nanos, Peer, Request, Rows, Share, Side};

#[cfg(test)]
mod tests;
