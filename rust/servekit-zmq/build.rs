//! Builds libzmq from source, with CURVE over libsodium; nothing is taken from the machine but its C++ compiler.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let include = std::env::var("DEP_SODIUM_INCLUDE").ok();
    let lib = std::env::var("DEP_SODIUM_LIB").ok();
    let location = match (lib, include) {
        (Some(lib), Some(include)) => zeromq_src::LibLocation::new(lib, include),
        _ => panic!("libsodium-sys-stable told no folder of its library and headers"),
    };
    zeromq_src::Build::new().with_libsodium(Some(location)).build();
}
