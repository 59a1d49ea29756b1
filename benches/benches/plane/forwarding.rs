//! libzmq's own proxy between the same peers: what forwarding costs at least.

use std::path::Path;

use servekit_zmq::{Context, Socket, SocketKind, proxy};

use crate::peers::Peer;

/// Messages a second from one sender to `ranks` receivers, and whatever `start` puts between them.
pub(crate) fn rate<T>(folder: &Path, ranks: usize, load: Load, start: impl FnOnce() -> T, go: impl FnOnce(&T)) -> f64 {
    let between = start();
    let mut receiver = Peer::start("receiver", folder, &[ranks, load.requests, load.report]);
    go(&between);
    let _sender = Peer::start("sender", folder, &[load.requests, load.ids, load.every]);
    receiver.line().parse().expect("a rate")
}

/// What is sent.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// How many requests.
    pub(crate) requests: usize,
    /// Prompt ids of each.
    pub(crate) ids: usize,
    /// After how many requests a rank ends them and reports its load; 0 for never.
    pub(crate) report: usize,
    /// Microseconds from one to the next; 0 sends as fast as they are taken.
    pub(crate) every: usize,
}

/// Messages a second through the proxy.
pub(crate) fn proxy_rate(folder: &Path, ranks: usize, load: Load) -> f64 {
    rate(folder, ranks, Load { report: 0, ..load }, || start_proxy(folder, ranks), |_| ())
}

/// Forwards from the ingress to the ranks, in turn, until the process ends.
fn start_proxy(folder: &Path, ranks: usize) {
    let context = Context::new();
    let socket = |kind| -> Socket {
        let socket = context.socket(kind).expect("a socket");
        // The router's own bounds.
        socket.set_recv_hwm(8192).expect("an option");
        socket.set_send_hwm(4096).expect("an option");
        socket
    };
    let (front, back) = (socket(SocketKind::Pull), socket(SocketKind::Push));
    let address = |name: &str| format!("ipc://{}", folder.join(name).display());
    front.bind(&address("ingress.ipc")).expect("an address");
    for rank in 0..ranks {
        back.bind(&address(&format!("rank{rank}.ipc"))).expect("an address");
    }
    std::thread::spawn(move || proxy(&front, &back));
}
