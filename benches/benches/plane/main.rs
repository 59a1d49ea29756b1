//! What crosses sockets and threads, against libzmq's own proxy where there is something to forward.
//!
//! Not criterion's: each measurement is a small system of processes, the peers being this program again. CPU time is
//! that of this process with all its threads. Give a part's name to run it alone: `cargo bench --bench plane -- router`.
//! With `SERVEKIT_BENCH_FIGURES=FILE` the figures are also written there, one JSON object a line, and with
//! `SERVEKIT_BENCH_FRAMES=FOLDER` the frames of all benches.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends by panicking")]

mod control;
mod controller;
mod fanout;
mod figures;
mod forwarding;
mod frames;
mod many;
mod peers;
mod router;

use figures::Figures;

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if arguments.first().is_some_and(|first| first == peers::FLAG) {
        arguments.remove(0);
        return peers::run(&arguments);
    }
    if let Some(folder) = std::env::var_os("SERVEKIT_BENCH_FRAMES") {
        frames::write(folder.as_ref());
    }
    let mut figures = Figures::open();
    for (name, part) in [
        ("fanout", fanout::run as fn(&mut Figures)),
        ("router", router::run),
        ("controller", controller::run),
        ("control", control::run),
        ("many", many::run),
    ] {
        if arguments.is_empty() || arguments.iter().any(|wanted| wanted == name) {
            part(&mut figures);
        }
    }
}
