//! The router from ingress to a rank, with dispatch, in-flight table and shard, beside the proxy.

use std::path::Path;
use std::time::Duration;

use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::fanout::MAX_UNACKNOWLEDGED;
use servekit_core::plane::{Plane, PlaneConfig, RESUME_MEMORY};

use crate::figures::Figures;
use crate::forwarding::{Load, proxy_rate, rate};
use crate::peers::{EPOCH, Folder};

const SAMPLES: usize = 7;

pub(crate) fn run(figures: &mut Figures) {
    for (ids, requests) in [(128, 100_000), (2048, 30_000)] {
        let load = Load { requests, ids, report: 64, every: 0 };
        let (mut ours, mut proxies, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let folder = Folder::new();
            let proxy = proxy_rate(folder.path(), 1, load);
            let folder = Folder::new();
            let plane = rate(folder.path(), 1, load, || start(folder.path(), 1, 1, None), activate);
            ours.push(plane);
            proxies.push(proxy);
            shares.push(plane / proxy);
        }
        figures.write(&format!("proxy_ids{ids}_messages_per_s"), "messages/s", &proxies);
        figures.write(&format!("router_ids{ids}_messages_per_s"), "messages/s", &ours);
        figures.write(&format!("router_ids{ids}_share_of_proxy"), "of proxy", &shares);
    }
}

/// A control plane of one rank.
pub(crate) fn start(folder: &Path, workers: usize, shards: usize, tokenizer: Option<&Path>) -> Plane {
    start_with(folder, workers, shards, tokenizer, 1, None)
}

/// A control plane of so many ranks, with a state page if one is named.
pub(crate) fn start_with(
    folder: &Path,
    workers: usize,
    shards: usize,
    tokenizer: Option<&Path>,
    ranks: usize,
    state_page: Option<String>,
) -> Plane {
    let plane = Plane::new(PlaneConfig {
        run_dir: folder.to_owned(),
        epoch: EPOCH,
        rank_epochs: vec![EPOCH; ranks],
        worker_epochs: vec![EPOCH; workers],
        shards,
        method: LoadBalanceMethod::RoundRobin,
        tokenizer_file: tokenizer.map(Path::to_owned),
        state_page,
        rank_wait: Duration::from_secs(60),
        max_queued: 1 << 30,
        max_queued_tokens: u64::MAX,
        max_per_worker: usize::MAX,
        resume_memory: RESUME_MEMORY,
        build: "bench".to_owned(),
        max_unacknowledged: MAX_UNACKNOWLEDGED,
        endpoints: None,
        remote: None,
    })
    .expect("settings");
    plane.start().expect("a plane");
    plane
}

/// Lets its rank take requests.
pub(crate) fn activate(plane: &Plane) {
    plane.set_rank(0, Some(EPOCH), true, String::new(), 1 << 30).expect("a rank");
}
