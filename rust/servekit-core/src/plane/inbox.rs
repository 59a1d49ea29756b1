//! How threads hand work to each other: bounded queues downstream, mailboxes back to the router.
//!
//! Work flows router → shards → fan-out; each may wait for room in the next one's queue, for none waits for one before
//! it. What goes back to the router goes by mailbox, which never makes anybody wait.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::queue::{Next, Receiver, Sender, queue};
use crate::state_page::StatePage;

/// How often a thread with nothing to do shows that it is alive.
pub(crate) const BEAT: Duration = Duration::from_millis(500);
/// Tasks that wait for a thread.
const CAPACITY: usize = 1024;

/// Where a thread beats.
#[derive(Clone)]
pub(crate) struct Pulse {
    page: Option<Arc<StatePage>>,
    thread: usize,
}

impl Pulse {
    pub(crate) fn new(page: Option<Arc<StatePage>>, thread: usize) -> Self {
        Self { page, thread }
    }

    pub(crate) fn beat(&self) {
        if let Some(page) = &self.page {
            page.beat(self.thread);
        }
    }
}

/// The tasks of one thread. It is over when all who send to it are: the router goes first, then the shards.
pub(crate) struct Inbox<T> {
    tasks: Receiver<T>,
    pulse: Pulse,
    beaten: Instant,
}

impl<T> Inbox<T> {
    pub(crate) fn new(pulse: Pulse) -> (Sender<T>, Self) {
        let (sender, tasks) = queue(CAPACITY);
        pulse.beat();
        (sender, Self { tasks, pulse, beaten: Instant::now() })
    }

    /// The next task, waiting as long as it takes; none when the plane ends.
    pub(crate) fn next(&mut self) -> Option<T> {
        loop {
            match self.next_within(BEAT) {
                Next::Item(task) => return Some(task),
                Next::Late => {}
                Next::Over => return None,
            }
        }
    }

    /// The next task, waiting so long at most.
    pub(crate) fn next_within(&mut self, limit: Duration) -> Next<T> {
        let deadline = Instant::now() + limit.min(BEAT);
        if deadline >= self.beaten + BEAT {
            self.pulse.beat();
            self.beaten = Instant::now();
        }
        self.tasks.next_until(deadline)
    }

    /// The next task if there is one.
    pub(crate) fn at_hand(&mut self) -> Option<T> {
        self.tasks.at_hand()
    }
}

/// Things for the router. Their number is bounded by what they are about: a request is stopped once, a worker cut for
/// messages that it loses, of which there are no more once its streams have ended.
pub(crate) struct Mailbox<T> {
    items: Mutex<Vec<T>>,
    waker: Arc<Waker>,
}

impl<T> Mailbox<T> {
    pub(crate) fn new(waker: &Arc<Waker>) -> Arc<Self> {
        Arc::new(Self { items: Mutex::new(Vec::new()), waker: Arc::clone(waker) })
    }

    pub(crate) fn put(&self, item: T) {
        self.items.lock().push(item);
        self.waker.wake();
    }

    pub(crate) fn put_all(&self, items: impl IntoIterator<Item = T>) {
        let mut held = self.items.lock();
        let before = held.len();
        held.extend(items);
        let more = held.len() > before;
        drop(held);
        if more {
            self.waker.wake();
        }
    }

    pub(crate) fn take(&self) -> Vec<T> {
        std::mem::take(&mut self.items.lock())
    }
}

/// Wakes the router from its poll.
pub(crate) struct Waker {
    pending: AtomicBool,
    writer: UnixStream,
    reader: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let (writer, reader) = UnixStream::pair()?;
        writer.set_nonblocking(true)?;
        reader.set_nonblocking(true)?;
        Ok(Arc::new(Self { pending: AtomicBool::new(false), writer, reader }))
    }

    /// The descriptor to poll.
    pub(crate) fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    pub(crate) fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // One byte is enough; a full pipe wakes as well.
            drop((&self.writer).write(&[1]));
        }
    }

    /// Makes the descriptor silent; what is looked at after this can't be missed.
    pub(crate) fn reset(&self) {
        let mut bytes = [0; 8];
        while (&self.reader).read(&mut bytes).is_ok_and(|read| read > 0) {}
        self.pending.store(false, Ordering::Release);
    }
}
