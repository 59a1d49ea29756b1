//! The data-parallel controller's whole loop, load reports coming back, beside the proxy with as many receivers.

use std::path::Path;

use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::plane::{Controller, ControllerConfig, Endpoints};

use crate::figures::Figures;
use crate::forwarding::{Load, proxy_rate, rate};
use crate::peers::{EPOCH, Folder};

const SAMPLES: usize = 5;
const LOAD: Load = Load { requests: 100_000, ids: 128, report: 32, every: 0 };

pub(crate) fn run(figures: &mut Figures) {
    for ranks in [2, 8, 64] {
        let (mut ours, mut shares) = (Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let folder = Folder::new();
            let proxy = proxy_rate(folder.path(), ranks, LOAD);
            let folder = Folder::new();
            let controller = rate(folder.path(), ranks, LOAD, || start(folder.path(), ranks), |_| ());
            ours.push(controller);
            shares.push(controller / proxy);
        }
        figures.write(&format!("controller_{ranks}_messages_per_s"), "messages/s", &ours);
        figures.write(&format!("controller_{ranks}_share_of_proxy"), "of proxy", &shares);
    }
}

fn start(folder: &Path, ranks: usize) -> Controller {
    let controller = Controller::new(ControllerConfig {
        endpoints: Endpoints::in_folder(folder, ranks),
        output: None,
        method: LoadBalanceMethod::TotalTokens,
        epoch: EPOCH,
        build: "bench".to_owned(),
    })
    .expect("settings");
    controller.start().expect("a controller");
    controller
}
