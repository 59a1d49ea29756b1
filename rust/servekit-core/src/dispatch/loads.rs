//! Searches over one number a rank, side by side in memory: their time is most of a choice's.

/// The load of a rank that takes no requests; no other rank has it.
pub(super) const INACTIVE: u64 = u64::MAX;

/// A load as it is kept: that of an active rank never looks like `INACTIVE`.
pub(super) fn kept(load: u64, active: bool) -> u64 {
    if active { load.min(INACTIVE - 1) } else { INACTIVE }
}

/// The active rank with the smallest load; of equal ones the first from `start` on, in turns.
pub(super) fn least(loads: &[u64], start: usize) -> Option<usize> {
    let smallest = smallest(loads);
    if smallest == INACTIVE { None } else { first(loads, start, |load| load == smallest) }
}

/// The first active rank from `start` on, in turns.
pub(super) fn first_active(loads: &[u64], start: usize) -> Option<usize> {
    first(loads, start, |load| load != INACTIVE)
}

fn first(loads: &[u64], start: usize, wanted: impl Fn(u64) -> bool) -> Option<usize> {
    let (before, after) = loads.split_at_checked(start).unwrap_or((loads, &[]));
    let after = after.iter().position(|&load| wanted(load)).map(|at| start + at);
    after.or_else(|| before.iter().position(|&load| wanted(load)))
}

/// The smallest number, without a branch for any: four searches go side by side, so that none waits for another.
fn smallest(loads: &[u64]) -> u64 {
    let (fours, rest) = loads.as_chunks::<4>();
    let mut lanes = [INACTIVE; 4];
    for four in fours {
        for (lane, &load) in lanes.iter_mut().zip(four) {
            *lane = (*lane).min(load);
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(INACTIVE, u64::min)
}

/// Sum of the active ranks' loads, and how many they are.
pub(super) fn sum(loads: &[u64]) -> (u64, u64) {
    loads.iter().filter(|&&load| load != INACTIVE).fold((0, 0), |(sum, n), &load| (load.saturating_add(sum), n + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_found_wherever_it_is_and_equal_ones_take_turns() {
        for ranks in 1..40 {
            for at in 0..ranks {
                let mut loads = vec![9; ranks];
                loads[at] = 3;
                for start in 0..=ranks {
                    assert_eq!(least(&loads, start), Some(at));
                }
                loads[at] = INACTIVE;
                loads[(at + 1) % ranks] = INACTIVE;
                let expected = (0..ranks).map(|i| (at + i) % ranks).find(|&rank| loads[rank] != INACTIVE);
                assert_eq!(least(&loads, at), expected);
                assert_eq!(first_active(&loads, at), expected);
            }
        }
        assert_eq!(least(&[], 0), None);
    }

    #[test]
    fn an_active_rank_with_any_load_is_active() {
        assert_eq!(least(&[kept(u64::MAX, true), kept(0, false)], 1), Some(0));
        assert_eq!(sum(&[4, INACTIVE, 5]), (9, 2));
    }
}
