//! The frames of the benches as files, for whoever measures something else on the same ones.

use std::path::Path;

use servekit_benches::{VOCABULARY, str_step, token_step};

/// Writes bodies of all kinds and sizes to a folder.
pub(crate) fn write(folder: &Path) {
    let write = |name: String, body: Vec<u8>| {
        std::fs::write(folder.join(format!("{name}.msgpack")), body).expect("a file");
    };
    for rows in [1, 16, 64, 256, 1024] {
        for workers in [1, 4, 16] {
            write(format!("str_b{rows}_w{workers}"), str_step(rows, workers));
            write(format!("tokenid_b{rows}_w{workers}"), token_step(rows, workers, VOCABULARY, 0));
            write(format!("tokenid_top5_b{rows}_w{workers}"), token_step(rows, workers, VOCABULARY, 5));
        }
    }
}
