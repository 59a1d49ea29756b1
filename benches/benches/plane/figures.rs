//! Clocks, medians and where they are written.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time of this process so far, all threads, user and system.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Where figures go: the terminal, and a file if one is asked for.
pub(crate) struct Figures(Option<File>);

impl Figures {
    pub(crate) fn open() -> Self {
        Self(std::env::var_os("SERVEKIT_BENCH_FIGURES").map(|path| File::create(path).expect("the figures' file")))
    }

    /// Writes the median of some samples, with the smallest and the largest; returns the median.
    pub(crate) fn write(&mut self, name: &str, unit: &str, samples: &[f64]) -> f64 {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (low, median, high) = (sorted[0], sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
        println!("{name:44} {median:12.4} {unit:12} ({low:.4} to {high:.4})");
        if let Some(file) = &mut self.0 {
            let line = serde_json::json!({"name": name, "unit": unit, "value": median, "low": low, "high": high});
            writeln!(file, "{line}").expect("the figures' file");
        }
        median
    }
}
