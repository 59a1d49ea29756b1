//! What the router counts.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since the start of the control process.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and values, in the order of the fields.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Requests that arrived and were neither fenced nor duplicates.
    requests,
    /// Requests sent to a rank.
    dispatched,
    /// Requests closed by a finished row of their rank.
    finished,
    /// Requests answered with an error before they reached a rank.
    refused,
    /// Requests ended by an error of the router or of supervision after they were accepted.
    failed,
    /// Requests whose wait for an active rank ran out; counted as failed, too.
    expired,
    /// Requests that the pipe to their rank did not take; counted as failed, too.
    unsent,
    /// Requests whose frames are not kept, for want of room: they could not be sent once more.
    unresumable,
    /// Aborts of clients that found their request.
    aborts,
    /// Stop strings that ended a request before its rank did.
    stop_matches,
    /// Requests whose id was live already.
    duplicates,
    /// Control messages passed on.
    control,
    /// Replies passed on.
    replies,
    /// Batches passed on.
    batches,
    /// Finished rows of requests that are not (or no longer) at that rank.
    stray,
    /// Frames of another life of their sender, or meant for another life of this process.
    fenced,
    /// Frames that came a second time.
    replayed,
    /// Frames that are missing before one that came.
    gaps,
    /// Frames that could not be read.
    malformed,
    /// Frames of a kind that does not belong on their link.
    unknown,
    /// Frames whose request id leads to another worker than the one that sent them.
    forged,
    /// Load reports older than one that is known, or about dispatches that never were.
    reports_ignored,
}

impl Counters {
    /// Frames that went nowhere, whatever was wrong with them, fenced ones aside.
    pub fn dropped(&self) -> u64 {
        self.replayed + self.malformed + self.unknown + self.forged + self.duplicates
    }
}
