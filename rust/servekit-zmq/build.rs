//! Builds libzmq from source, with CURVE over libsodium; nothing is taken from the machine but its C++ compiler.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let include = std::env::var("DEP_SODIUM_INCLUDE").ok();
    let lib = std::env::var("DEP_SODIUM_LIB").ok();
    let location = match (lib, include) {
        (Some(lib), Some(include)) => zeromq_src::LibLocation::new(lib, include),
        _ => panic!("libsodium-sys-stable told no folder of its library and headers"),
    };
    // Its compiler warnings are its authors' business: they would be shown as ours on every build.
    let flags = std::env::var("CXXFLAGS").unwrap_or_default();
    // SAFETY: a build script of one thread.
    #[allow(unsafe_code)]
    unsafe {
        std::env::set_var("CXXFLAGS", format!("{flags} -w"));
    }
    zeromq_src::Build::new().with_libsodium(Some(location)).build();
}
