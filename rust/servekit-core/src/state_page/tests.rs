use super::*;

/// A page whose segment is gone when the test ends, however it ends.
struct TestPage(StatePage);

impl TestPage {
    fn new(what: &str, workers: usize, ranks: usize) -> Self {
        Self::with_followers(what, workers, ranks, 0)
    }

    fn with_followers(what: &str, workers: usize, ranks: usize, followers: usize) -> Self {
        let name = format!("servekit-core-test-{}-{what}", std::process::id());
        Self(StatePage::create(&name, workers, ranks, followers).unwrap())
    }
}

impl Drop for TestPage {
    fn drop(&mut self) {
        StatePage::unlink(self.0.name()).unwrap();
    }
}

#[test]
fn every_word_of_a_worker_lies_apart() {
    let TestPage(page) = &TestPage::new("apart", 3, 2);
    for worker in 0..3 {
        page.start_worker(worker, 1, 7);
        for field in [Worker::Requests, Worker::CacheHitTokens] {
            page.worker_add(worker, field, 1);
        }
        for histogram in Histogram::ALL {
            page.observe(worker, histogram, 0.0, 1);
            page.observe(worker, histogram, 1e9, 1);
        }
        for rank in 0..2 {
            page.worker_rank_add(worker, rank, WorkerRank::PromptTokens, 10);
            page.worker_rank_add(worker, rank, WorkerRank::GenerationTokens, 1);
        }
    }
    for worker in 0..3 {
        assert_eq!(page.worker_words(worker).iter().sum::<u64>(), 1 + 7 + 2, "worker {worker}");
    }
    for histogram in Histogram::ALL {
        let counts = page.counted(histogram).counts;
        assert_eq!((counts[0], counts[counts.len() - 1], counts.iter().sum()), (3, 3, 6), "{}", histogram.name());
    }
    assert_eq!([page.rank_totals(0), page.rank_totals(1), page.rank_totals(2)], [[30, 0, 3], [30, 0, 3], [0; 3]]);
}

#[test]
fn a_follower_has_a_block_of_its_own_behind_the_ranks() {
    let TestPage(page) = &TestPage::with_followers("followers", 2, 2, 3);
    for index in 0..6 {
        page.pulse(index, index as u64 + 1);
        page.enter(index, 4, 10 + index as u64);
    }
    page.start_worker(0, 8, 9);
    let opened = StatePage::open(page.name()).unwrap();
    assert_eq!((opened.ranks(), opened.followers()), (2, 3));
    for index in 0..5 {
        assert_eq!(opened.rank(index, Rank::PulseEpoch), index as u64 + 1);
        assert_eq!(opened.rank(index, Rank::Step), 10 + index as u64);
    }
    assert_eq!(opened.rank_words(5), [0; RANK_FIELDS.len()]);
    assert_eq!(opened.worker_words(0).iter().sum::<u64>(), 17);
}

#[test]
fn what_moves_is_told_apart_from_what_it_does() {
    let TestPage(page) = &TestPage::new("moves", 1, 1);
    page.enter(0, 4, 1);
    let since = page.rank(0, Rank::PhaseSinceNs);
    assert_eq!(page.rank(0, Rank::MovedNs), since);
    std::thread::sleep(std::time::Duration::from_millis(1));
    page.moved(0);
    assert_eq!(page.rank(0, Rank::PhaseSinceNs), since);
    assert!(page.rank(0, Rank::MovedNs) > since);
    page.awaits(0, true);
    assert_eq!((page.rank(0, Rank::Awaits), page.rank(0, Rank::Phase)), (1, 4));
}

#[test]
fn a_value_lies_in_the_first_bucket_whose_bound_it_does_not_exceed() {
    let TestPage(page) = &TestPage::new("buckets", 1, 1);
    let bounds = Histogram::Gap.bounds();
    for (i, bound) in bounds.iter().enumerate() {
        page.observe(0, Histogram::Gap, *bound, 2);
        let counted = page.counted(Histogram::Gap);
        assert_eq!((counted.counts[i], counted.counts[i + 1]), (2, 0), "{bound}");
    }
    assert!((page.counted(Histogram::Gap).sum_s - 2.0 * bounds.iter().sum::<f64>()).abs() < 1e-6);
}

#[test]
fn what_is_no_time_counts_as_none() {
    let TestPage(page) = &TestPage::new("none", 1, 1);
    for wrong in [f64::NAN, -1.0, f64::NEG_INFINITY] {
        page.observe(0, Histogram::Queue, wrong, 1);
    }
    page.observe(1, Histogram::Queue, 1.0, 1);
    let counted = page.counted(Histogram::Queue);
    assert_eq!((counted.counts[0], counted.counts.iter().sum::<u64>(), counted.sum_s), (3, 3, 0.0));
}

#[test]
fn a_worker_that_ended_holds_nothing_and_what_it_counted_stays() {
    let TestPage(page) = &TestPage::new("ended", 1, 1);
    page.start_worker(0, 3, 9);
    assert!(page.reserve(0, 2, 20, 8));
    page.worker_add(0, Worker::CacheBytes, 5);
    page.worker_add(0, Worker::Requests, 4);
    page.observe(0, Histogram::EndToEnd, 1.0, 1);
    page.end_worker(0);
    let held = [Worker::Epoch, Worker::Pid, Worker::OpenStreams, Worker::ReservedTokens, Worker::CacheBytes];
    assert_eq!(held.map(|field| page.worker(0, field)), [3, 0, 0, 0, 0]);
    assert_eq!(page.worker(0, Worker::Requests), 4);
    assert_eq!(page.counted(Histogram::EndToEnd).counts.iter().sum::<u64>(), 1);
}

#[test]
fn histograms_are_found_by_their_names_and_their_bounds_rise() {
    for histogram in Histogram::ALL {
        assert_eq!(Histogram::named(histogram.name()), Some(histogram));
        assert!(histogram.bounds().is_sorted_by(|a, b| a < b));
    }
    assert_eq!(Histogram::named("gaps"), None);
}
