//! The control plane of servekit: pure Rust, without Python.
//!
//! A request's way: `router` takes it and `dispatch` chooses its rank; what the rank sends back is scanned once (`wire`,
//! `split`), made text by its shard (`detok`) and sent to its worker (`fanout`), which writes it as events (`sse`). `plane`
//! runs that in threads; the `state_page` shows it to the other processes.

pub mod detok;
pub mod dispatch;
pub mod encode;
pub mod fanout;
pub mod log;
pub mod plane;
pub mod router;
pub mod split;
pub mod sse;
pub mod state_page;
pub mod stats;
pub mod wire;
