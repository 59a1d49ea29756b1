#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| servekit_fuzz::frames::run(data));
