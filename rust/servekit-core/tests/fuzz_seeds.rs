//! Bytes that a fuzzer found worth keeping are taken again.

#[expect(unreachable_pub, reason = "it is a crate of its own for the fuzzer")]
#[path = "../../fuzz/src/lib.rs"]
mod targets;

#[test]
fn no_seed_shows_a_fault() {
    for (name, run) in targets::TARGETS {
        let folder = format!("{}/../fuzz/seeds/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut seeds: Vec<_> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        seeds.sort();
        assert!(!seeds.is_empty(), "{folder} is empty");
        for seed in seeds {
            println!("{}", seed.display());
            run(&std::fs::read(seed).unwrap());
        }
    }
}
