//! What a worker measures of its requests' times, and the bounds between which it counts.

/// A histogram in a worker's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Histogram {
    /// From a streamed request's admission to its first piece.
    FirstToken = 0,
    /// From one piece of a stream to the next.
    Gap = 1,
    /// From a request's admission to its end.
    EndToEnd = 2,
    /// From a request's arrival at its rank to its first step.
    Queue = 3,
}

/// Bounds of waits: from a millisecond to two minutes.
const WAITS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0,
    30.0, 60.0, 120.0,
];
/// Bounds of gaps: fine around the steps that models take.
const GAPS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0,
];
/// Bounds of whole requests: from a tenth of a second to half an hour.
const WHOLES: &[f64] = &[
    0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0,
    600.0, 1800.0,
];

impl Histogram {
    /// All of them, in order.
    pub const ALL: [Self; 4] = [Self::FirstToken, Self::Gap, Self::EndToEnd, Self::Queue];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FirstToken => "first_token",
            Self::Gap => "gap",
            Self::EndToEnd => "end_to_end",
            Self::Queue => "queue",
        }
    }

    /// The histogram of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|each| each.name() == name)
    }

    /// Upper bounds of its buckets in seconds, inclusive and rising; what is above the last has a bucket of its own.
    pub const fn bounds(self) -> &'static [f64] {
        match self {
            Self::FirstToken | Self::Queue => WAITS,
            Self::Gap => GAPS,
            Self::EndToEnd => WHOLES,
        }
    }
}

/// What all workers together counted.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// How many values lie in each bucket; the last is for those above all bounds.
    pub counts: Vec<u64>,
    /// Seconds of all values together.
    pub sum_s: f64,
}
