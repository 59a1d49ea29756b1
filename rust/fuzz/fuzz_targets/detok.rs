#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| servekit_fuzz::detok::run(data));
