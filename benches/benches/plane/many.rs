//! The control process with many ranks: CPU time of a request and its answer, all threads, beside that with 8 ranks.
//!
//! Requests that come one by one are sent one by one, to however many ranks. In a flood, those for one rank go out
//! together: with 8 ranks a system call sends several, with 256 hardly ever two.

use std::path::Path;

use servekit_core::plane::Plane;
use servekit_core::state_page::StatePage;

use crate::figures::{Figures, cpu_time};
use crate::forwarding::{Load, rate};
use crate::peers::{EPOCH, Folder};
use crate::router::start_with;

const SAMPLES: usize = 5;
const FEW: usize = 8;
const ONE_BY_ONE: Load = Load { requests: 20_000, ids: 128, report: 32, every: 100 };
const FLOOD: Load = Load { requests: 100_000, every: 0, ..ONE_BY_ONE };

pub(crate) fn run(figures: &mut Figures) {
    for (name, load) in [("one_by_one", ONE_BY_ONE), ("flood", FLOOD)] {
        let mut few = f64::NAN;
        for ranks in [FEW, 64, 256] {
            let samples: Vec<f64> = (0..SAMPLES).map(|_| sample(ranks, load)).collect();
            let each = figures.write(&format!("control_{ranks}_ranks_{name}_us_per_request"), "us", &samples);
            if ranks == FEW {
                few = each;
            } else {
                figures.write(&format!("control_{ranks}_ranks_{name}_over_{FEW}"), "times", &[each / few]);
            }
        }
    }
}

/// Microseconds of CPU a request, which ends with a row of its rank's report.
fn sample(ranks: usize, load: Load) -> f64 {
    let folder = Folder::new();
    let mut before = None;
    let page = StatePage::create(&format!("servekit-bench-{}", std::process::id()), 1, ranks, 0).expect("a page");
    let start = || plane(folder.path(), ranks, &page);
    rate(folder.path(), ranks, load, start, |plane| {
        activate(plane, ranks);
        before = Some(cpu_time());
    });
    StatePage::unlink(page.name()).expect("a page");
    let before = before.expect("it has begun");
    (cpu_time() - before).as_secs_f64() * 1e6 / load.requests as f64
}

fn plane(folder: &Path, ranks: usize, page: &StatePage) -> Plane {
    start_with(folder, 1, 1, None, ranks, Some(page.name().to_owned()))
}

fn activate(plane: &Plane, ranks: usize) {
    for rank in 0..ranks {
        plane.set_rank(rank, Some(EPOCH), true, String::new(), 1 << 30).expect("a rank");
    }
}
