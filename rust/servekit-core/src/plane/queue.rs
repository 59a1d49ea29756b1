//! A bounded queue between threads, made for a reader who sleeps between two steps.
//!
//! The reader takes all that waits at once, and a writer makes a system call only to wake a reader who sleeps. Neither
//! turns in a loop before it sleeps, as the channels of most libraries do: here the next item is a millisecond away.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

struct State<T> {
    items: VecDeque<T>,
    writers: usize,
    /// The reader is there.
    read: bool,
    /// The reader sleeps.
    asleep: bool,
}

struct Queue<T> {
    state: Mutex<State<T>>,
    /// Something came, or the last writer went.
    filled: Condvar,
    /// Room was made, or the reader went.
    room: Condvar,
    capacity: usize,
}

/// The writing end; each clone is one.
pub(crate) struct Sender<T>(Arc<Queue<T>>);

/// The reading end.
pub(crate) struct Receiver<T> {
    queue: Arc<Queue<T>>,
    taken: VecDeque<T>,
}

/// What a wait came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<T> {
    /// The next item.
    Item(T),
    /// None in time.
    Late,
    /// None any more: all writers are gone.
    Over,
}

/// A queue of `capacity` items that wait, beside those that the reader has taken.
pub(crate) fn queue<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let state = State { items: VecDeque::new(), writers: 1, read: true, asleep: false };
    let queue = Arc::new(Queue { state: Mutex::new(state), filled: Condvar::new(), room: Condvar::new(), capacity });
    (Sender(Arc::clone(&queue)), Receiver { queue, taken: VecDeque::new() })
}

impl<T> Sender<T> {
    /// Adds an item, waiting for room. False if the reader has gone, which must have said why.
    pub(crate) fn send(&self, item: T) -> bool {
        let queue = &*self.0;
        let mut state = queue.state.lock();
        while state.items.len() >= queue.capacity && state.read {
            queue.room.wait(&mut state);
        }
        if !state.read {
            return false;
        }
        state.items.push_back(item);
        let wake = std::mem::take(&mut state.asleep);
        drop(state);
        if wake {
            queue.filled.notify_one();
        }
        true
    }

    /// Items that wait.
    pub(crate) fn len(&self) -> usize {
        self.0.state.lock().items.len()
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.state.lock().writers += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state.lock().writers -= 1;
        self.0.filled.notify_one();
    }
}

impl<T> Receiver<T> {
    /// The next item, waiting for one until a time.
    pub(crate) fn next_until(&mut self, deadline: Instant) -> Next<T> {
        if let Some(item) = self.at_hand() {
            return Next::Item(item);
        }
        let queue = &*self.queue;
        let mut state = queue.state.lock();
        while state.items.is_empty() {
            if state.writers == 0 {
                return Next::Over;
            }
            state.asleep = true;
            if queue.filled.wait_until(&mut state, deadline).timed_out() && state.items.is_empty() {
                state.asleep = false;
                return Next::Late;
            }
        }
        state.asleep = false;
        drop(state);
        self.at_hand().map_or(Next::Late, Next::Item)
    }

    /// The next item if there is one.
    pub(crate) fn at_hand(&mut self) -> Option<T> {
        if self.taken.is_empty() {
            let mut state = self.queue.state.lock();
            let full = state.items.len() >= self.queue.capacity;
            std::mem::swap(&mut state.items, &mut self.taken);
            drop(state);
            if full {
                self.queue.room.notify_all();
            }
        }
        self.taken.pop_front()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let items = {
            let mut state = self.queue.state.lock();
            state.read = false;
            std::mem::take(&mut state.items)
        };
        self.queue.room.notify_all();
        // Not under the lock: an item may hold a sender of this queue.
        drop(items);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn all_that_many_writers_send_is_read_once_and_in_each_ones_order() {
        let (sender, mut receiver) = queue(3);
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let sender = sender.clone();
                std::thread::spawn(move || (0..1000).all(|i| sender.send((writer, i))))
            })
            .collect();
        drop(sender);
        let mut read = [0; 4];
        loop {
            match receiver.next_until(soon()) {
                Next::Item((writer, i)) => {
                    assert_eq!(i, read[writer]);
                    read[writer] += 1;
                }
                Next::Late => panic!("a writer was not woken"),
                Next::Over => break,
            }
        }
        assert_eq!(read, [1000; 4]);
        assert!(writers.into_iter().all(|writer| writer.join().unwrap()));
    }

    #[test]
    fn a_wait_ends_in_time_and_a_full_queue_when_the_reader_goes() {
        let (sender, mut receiver) = queue(2);
        assert_eq!(receiver.next_until(Instant::now()), Next::Late);
        assert!(sender.send(1) && sender.send(2));
        assert_eq!(sender.len(), 2);
        let blocked = std::thread::spawn(move || (sender.send(3), sender));
        std::thread::yield_now();
        assert_eq!(receiver.next_until(soon()), Next::Item(1));
        let (taken, sender) = blocked.join().unwrap();
        assert!(taken);
        assert_eq!([receiver.at_hand(), receiver.at_hand(), receiver.at_hand()], [Some(2), Some(3), None]);
        let full = std::thread::spawn(move || (0..3).map(|i| sender.send(i)).collect::<Vec<_>>());
        while receiver.queue.state.lock().items.len() < 2 {
            std::thread::yield_now();
        }
        drop(receiver);
        assert_eq!(full.join().unwrap(), [true, true, false]);
    }
}
