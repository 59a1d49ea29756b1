//! Log lines from Rust threads, for Python to write.
//!
//! A thread never waits for a reader: a full channel drops the line and counts it.

use std::fmt::Arguments;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
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

impl Level {
    /// The level of that name in servekit's flags.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "debug" => Some(Self::Debug),
            "info" => Some(Self::Info),
            "warning" => Some(Self::Warning),
            "error" => Some(Self::Error),
            _ => None,
        }
    }

    /// Its name in servekit's flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
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
    shared: Arc<Shared>,
}

/// The reading end.
#[derive(Debug)]
pub struct LogSource {
    lines: Receiver<Line>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    dropped: AtomicU64,
    /// Least level that is written; 0 until somebody says.
    level: AtomicU8,
}

/// A channel of log lines.
pub fn log_channel() -> (LogSink, LogSource) {
    let (sender, receiver) = bounded(CAPACITY);
    let shared = Arc::<Shared>::default();
    (LogSink { lines: sender, shared: Arc::clone(&shared) }, LogSource { lines: receiver, shared })
}

impl LogSink {
    /// Writes a line, or counts it as dropped when the reader is far behind.
    pub fn write(&self, level: Level, target: &'static str, message: Arguments<'_>) {
        if level as u8 >= self.shared.level.load(Ordering::Relaxed) {
            self.put(Line { level, target, message: message.to_string() });
        }
    }

    /// Writes what matters that much from now on, and a line that says so, whatever the level.
    pub fn set_level(&self, level: Level) {
        self.shared.level.store(level as u8, Ordering::Relaxed);
        self.put(Line { level: Level::Info, target: "log", message: format!("the log level is {}", level.name()) });
    }

    fn put(&self, line: Line) {
        if self.lines.try_send(line).is_err() {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl LogSource {
    /// The next line, or none within `timeout`. Lines that were dropped are told as one line.
    pub fn next(&self, timeout: Duration) -> Option<Line> {
        if self.lines.is_empty() {
            let dropped = self.shared.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                let message = format!("{dropped} log lines were dropped");
                return Some(Line { level: Level::Warning, target: "log", message });
            }
        }
        self.lines.recv_timeout(timeout).ok()
    }

    /// The level that [`LogSink::set_level`] set, in the numbers of [`Level`]; 0 if it never did.
    pub fn level(&self) -> u8 {
        self.shared.level.load(Ordering::Relaxed)
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

    #[test]
    fn what_matters_less_than_the_level_is_not_written() {
        let (sink, source) = log_channel();
        assert_eq!(source.level(), 0);
        sink.set_level(Level::Warning);
        assert_eq!(source.level(), Level::Warning as u8);
        sink.write(Level::Info, "test", format_args!("no"));
        sink.write(Level::Warning, "test", format_args!("yes"));
        let said: Vec<_> = std::iter::from_fn(|| source.next(Duration::ZERO)).map(|line| line.message).collect();
        assert_eq!(said, ["the log level is warning", "yes"]);
    }
}
