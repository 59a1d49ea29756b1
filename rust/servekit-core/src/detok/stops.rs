//! All stop strings of a request as one automaton (Aho and Corasick, 1975).

/// A state: what it has read is the longest suffix of the text that begins a stop string.
#[derive(Default)]
struct State {
    next: Vec<(u8, u32)>,
    /// State of the longest shorter suffix.
    fail: u32,
    /// Length of that suffix in bytes.
    depth: u32,
    /// Length of the longest stop string that ends here, 0 for none.
    matched: u32,
}

impl State {
    fn step(&self, byte: u8) -> Option<u32> {
        self.next.iter().find(|(known, _)| *known == byte).map(|(_, state)| *state)
    }
}

/// Finds the stop string that is complete first; of those complete at the same byte, the longest.
pub(super) struct Stops {
    states: Vec<State>,
    /// Bytes with which stop strings begin, a bit each: most text is passed by looking here alone.
    begins: [u64; 4],
    at: u32,
}

impl Stops {
    /// None without a non-empty stop string.
    pub(super) fn new(stops: &[String]) -> Option<Self> {
        let mut states = vec![State::default()];
        for stop in stops {
            let mut at = 0_usize;
            for byte in stop.bytes() {
                at = match states[at].step(byte) {
                    Some(next) => next as usize,
                    None => {
                        let new = states.len();
                        states.push(State { depth: states[at].depth + 1, ..State::default() });
                        states[at].next.push((byte, new as u32));
                        new
                    }
                };
            }
            states[at].matched = states[at].depth;
        }
        if states.len() == 1 {
            return None;
        }
        let mut begins = [0; 4];
        states[0].next.iter().for_each(|(byte, _)| begins[usize::from(byte >> 6)] |= 1 << (byte & 63));
        let mut stops = Self { states, begins, at: 0 };
        stops.link();
        Some(stops)
    }

    /// Set where each state falls back to, nearest to the root first.
    fn link(&mut self) {
        let mut queue = std::collections::VecDeque::from([0_u32]);
        while let Some(at) = queue.pop_front() {
            for i in 0..self.states[at as usize].next.len() {
                let (byte, next) = self.states[at as usize].next[i];
                let fail = if at == 0 { 0 } else { self.follow(self.states[at as usize].fail, byte) };
                let longest = self.states[fail as usize].matched;
                let state = &mut self.states[next as usize];
                state.fail = fail;
                if state.matched == 0 {
                    state.matched = longest;
                }
                queue.push_back(next);
            }
        }
    }

    fn follow(&self, mut at: u32, byte: u8) -> u32 {
        loop {
            if let Some(next) = self.states[at as usize].step(byte) {
                return next;
            }
            if at == 0 {
                return 0;
            }
            at = self.states[at as usize].fail;
        }
    }

    /// Read text; where a stop string ends in it, and that string's length.
    #[inline]
    pub(super) fn find(&mut self, text: &[u8]) -> Option<(usize, usize)> {
        let begins = |byte: &u8| self.begins[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1;
        if self.at == 0 && !text.iter().any(begins) { None } else { self.read(text) }
    }

    fn read(&mut self, text: &[u8]) -> Option<(usize, usize)> {
        for (i, byte) in text.iter().enumerate() {
            self.at = self.follow(self.at, *byte);
            let matched = self.states[self.at as usize].matched;
            if matched > 0 {
                return Some((i + 1, matched as usize));
            }
        }
        None
    }

    /// Bytes at the end of the text that could still become a stop string.
    #[inline]
    pub(super) fn held(&self) -> usize {
        if self.at == 0 { 0 } else { self.states[self.at as usize].depth as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(strings: &[&str]) -> Stops {
        Stops::new(&strings.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_first_complete_match_wins_whatever_the_pieces() {
        for cut in 0..=7 {
            let mut automaton = stops(&["abcd", "bc", "zzz"]);
            let (a, b) = "xxabcdx".split_at(cut);
            let found = automaton
                .find(a.as_bytes())
                .or_else(|| automaton.find(b.as_bytes()).map(|(end, len)| (end + cut, len)));
            assert_eq!(found, Some((5, 2)), "cut at {cut}");
        }
    }

    #[test]
    fn the_longest_of_two_that_end_together_wins() {
        assert_eq!(stops(&["bc", "abc"]).find(b"zabc"), Some((4, 3)));
        assert_eq!(stops(&["abc", "bc"]).find(b"zbc"), Some((3, 2)));
    }

    #[test]
    fn only_what_could_become_a_stop_is_held() {
        let mut automaton = stops(&["aab"]);
        assert_eq!((automaton.find(b"xa"), automaton.held()), (None, 1));
        assert_eq!((automaton.find(b"a"), automaton.held()), (None, 2));
        assert_eq!((automaton.find(b"a"), automaton.held()), (None, 2));
        assert_eq!((automaton.find(b"x"), automaton.held()), (None, 0));
    }

    #[test]
    fn empty_strings_stop_nothing() {
        assert!(Stops::new(&[String::new()]).is_none());
        assert_eq!(stops(&["", "b"]).find(b"ab"), Some((2, 1)));
    }
}
