//! How a thread's end is told: never silently.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// What ends a thread of the control process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ThreadError {
    /// libzmq failed.
    #[error("zmq: {0}")]
    Zmq(#[from] servekit_zmq::Error),
    /// The system failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// The first thing that went wrong for good, and the flag that ends all threads.
#[derive(Debug)]
pub(crate) struct Report {
    fatal: Mutex<Option<String>>,
    told: Condvar,
    stop: AtomicBool,
}

impl Report {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { fatal: Mutex::new(None), told: Condvar::new(), stop: AtomicBool::new(false) })
    }

    /// Notes what went wrong; the first cause stays.
    pub(crate) fn fatal(&self, message: String) {
        self.fatal.lock().get_or_insert(message);
        self.told.notify_all();
    }

    /// What went wrong, waiting up to `timeout` for something to.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<String> {
        let deadline = Instant::now().checked_add(timeout);
        let mut fatal = self.fatal.lock();
        while fatal.is_none() {
            let timed_out = match deadline {
                Some(deadline) => self.told.wait_until(&mut fatal, deadline).timed_out(),
                None => {
                    self.told.wait(&mut fatal);
                    false
                }
            };
            if timed_out {
                break;
            }
        }
        fatal.clone()
    }

    /// Ends all threads.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// Starts a thread whose panic or error ends the plane with a report. `wake` is called when it has ended.
pub(crate) fn spawn(
    name: String,
    report: &Arc<Report>,
    wake: impl Fn() + Send + 'static,
    body: impl FnOnce() -> Result<(), ThreadError> + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let report = Arc::clone(report);
    std::thread::Builder::new().name(name.clone()).spawn(move || {
        let end = catch_unwind(AssertUnwindSafe(body));
        match end {
            Ok(Ok(())) if report.stopping() => {}
            Ok(Ok(())) => report.fatal(format!("thread {name} ended before its time")),
            Ok(Err(error)) => report.fatal(format!("thread {name} failed: {error}")),
            Err(panic) => report.fatal(format!("thread {name} panicked: {}", said(panic.as_ref()))),
        }
        report.stop();
        wake();
    })
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;

    use super::*;

    fn end(body: impl FnOnce() -> Result<(), ThreadError> + Send + 'static) -> (Option<String>, bool) {
        let report = Report::new();
        let (woken, wakes) = bounded(1);
        let wake = move || woken.try_send(()).unwrap_or_default();
        spawn("detok-7".to_owned(), &report, wake, body).unwrap().join().unwrap();
        wakes.recv_timeout(Duration::from_secs(5)).unwrap();
        (report.wait(Duration::ZERO), report.stopping())
    }

    #[test]
    fn no_thread_ends_silently() {
        let (said, stopping) = end(|| panic!("row {}", 3));
        assert_eq!((said.as_deref(), stopping), (Some("thread detok-7 panicked: row 3"), true));
        let (said, _) = end(|| Err(servekit_zmq::Error::Nul.into()));
        assert_eq!(said.as_deref(), Some("thread detok-7 failed: zmq: text holds a NUL byte"));
        let (said, _) = end(|| Ok(()));
        assert_eq!(said.as_deref(), Some("thread detok-7 ended before its time"));
    }

    #[test]
    fn the_first_cause_stays() {
        let report = Report::new();
        assert_eq!(report.wait(Duration::from_millis(1)), None);
        report.fatal("first".to_owned());
        report.fatal("second".to_owned());
        assert_eq!(report.wait(Duration::ZERO).as_deref(), Some("first"));
    }
}
