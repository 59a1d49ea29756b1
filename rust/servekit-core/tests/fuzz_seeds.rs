//! What `make fuzz` starts from, played again without a fuzzer: each seed as it is, cut at every byte, and with every byte
//! changed.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(unreachable_pub, reason = "the fuzz crate is a library")]
#[path = "../../fuzz/src/lib.rs"]
mod fuzz;

use std::path::Path;

/// Bytes that mean something to msgpack, to the envelope or to UTF-8.
const TELLING: [u8; 8] = [0x00, 0x01, 0x7f, 0x80, 0xc0, 0xdd, 0xe2, 0xff];

#[test]
fn no_seed_and_nothing_near_one_makes_a_part_panic() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for (name, run) in fuzz::TARGETS {
        let files: Vec<_> = std::fs::read_dir(seeds.join(name)).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty(), "{name} has no seeds");
        for file in files {
            let seed = std::fs::read(&file).unwrap();
            run(&seed);
            for at in 0..seed.len() {
                run(&seed[..at]);
                for byte in TELLING {
                    let mut changed = seed.clone();
                    changed[at] = byte;
                    run(&changed);
                }
            }
        }
    }
}
