//! What a worker has not said yet that it has handled.

use std::collections::VecDeque;

/// Numbers and sizes of the frames on a link that wait for their acknowledgement.
#[derive(Default)]
pub(super) struct Unacknowledged {
    frames: VecDeque<(u64, usize)>,
    bytes: usize,
}

impl Unacknowledged {
    /// A frame was sent; numbers rise.
    pub(super) fn sent(&mut self, number: u64, bytes: usize) {
        self.frames.push_back((number, bytes));
        self.bytes += bytes;
    }

    /// The worker has handled all up to `number`.
    pub(super) fn handled(&mut self, number: u64) {
        while let Some(&(sent, bytes)) = self.frames.front() {
            if sent > number {
                break;
            }
            self.bytes -= bytes;
            self.frames.pop_front();
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn frames(&self) -> usize {
        self.frames.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_handled_counts_no_more() {
        let mut waiting = Unacknowledged::default();
        for (number, bytes) in [(2, 10), (3, 20), (7, 30)] {
            waiting.sent(number, bytes);
        }
        waiting.handled(1);
        assert_eq!((waiting.frames(), waiting.bytes()), (3, 60));
        waiting.handled(5);
        assert_eq!((waiting.frames(), waiting.bytes()), (1, 30));
        waiting.handled(4);
        assert_eq!((waiting.frames(), waiting.bytes()), (1, 30));
        waiting.handled(u64::MAX);
        assert_eq!((waiting.frames(), waiting.bytes()), (0, 0));
    }
}
