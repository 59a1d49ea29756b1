//! Log lines from Rust threads, for Python to write.
//!
//! A thread never waits for a reader: a full channel drops the line and counts it.

use std::fmt::Arguments;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

/// Lines that wait for the reader.
const CAPACITY: usize = 4096;

/// How much a line matters. The numbers are those of Python's `logging`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// For who looks for a fault.
    Debug = 10,
    /// Worth knowing.
    Info = 20,
    /// Something was lost or refused.
    Warning = 30,
    /// Something is broken.
    Error = 40,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// How much it matters.
    pub level: Level,
    /// Part of the program it comes from, such as `router`.
    pub target: &'static str,
    /// Text without a line end.
    pub message: String,
}

/// The writing end; cheap to clone.
#[derive(Clone, Debug)]
pub struct LogSink {
    lines: Sender<Line>,
    dropped: Arc<AtomicU64>,
}

/// The reading end.
#[derive(Debug)]
pub struct LogSource {
    lines: Receiver<Line>,
    dropped: Arc<AtomicU64>,
}

/// A channel of log lines.
pub fn log_channel() -> (LogSink, LogSource) {
    let (sender, receiver) = bounded(CAPACITY);
    let dropped = Arc::new(AtomicU64::new(0));
    (LogSink { lines: sender, dropped: Arc::clone(&dropped) }, LogSource { lines: receiver, dropped })
}

impl LogSink {
    /// Writes a line, or counts it as dropped when the reader is far behind.
    pub fn write(&self, level: Level, target: &'static str, message: Arguments<'_>) {
        if self.lines.try_send(Line { level, target, message: message.to_string() }).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl LogSource {
    /// The next line, or none within `timeout`. Lines that were dropped are told as one line.
    pub fn next(&self, timeout: Duration) -> Option<Line> {
        if self.lines.is_empty() {
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                let message = format!("{dropped} log lines were dropped");
                return Some(Line { level: Level::Warning, target: "log", message });
            }
        }
        self.lines.recv_timeout(timeout).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_never_waits_and_what_is_lost_is_told() {
        let (sink, source) = log_channel();
        for i in 0..CAPACITY + 3 {
            sink.write(Level::Info, "test", format_args!("{i}"));
        }
        for i in 0..CAPACITY {
            assert_eq!(source.next(Duration::ZERO).unwrap().message, i.to_string());
        }
        assert_eq!(source.next(Duration::ZERO).unwrap().message, "3 log lines were dropped");
        assert_eq!(source.next(Duration::ZERO), None);
    }
}
