//! A worker that only reads.

use std::path::Path;

use servekit_core::wire::Rid;
use servekit_zmq::{Context, SocketKind};

use super::EPOCH;

/// Binds the socket of a worker and reads for ever.
pub(super) fn run(folder: &Path, worker: u16) {
    let context = Context::new();
    let socket = context.socket(SocketKind::Pull).expect("a socket");
    socket.set_recv_hwm(0).expect("an option");
    let route = Rid::mint(worker, EPOCH, 0).route();
    socket.bind(&format!("ipc://{}", folder.join(route.to_string()).display())).expect("an address");
    println!("ready");
    loop {
        socket.recv(false).expect("a message");
    }
}
