//! What a child process does to end with its parent, and what this build is.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use servekit_core::wire::SCHEMA;

use crate::errors::{ResourceError, SettingError};

/// Commit that the build was made from, where the builder said it.
const COMMIT: Option<&str> = option_env!("SERVEKIT_COMMIT");

/// Text by which peers and people know this build.
pub(crate) fn build_name() -> String {
    match COMMIT {
        Some(commit) => format!("{}+{commit}", env!("CARGO_PKG_VERSION")),
        None => env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// What this build is.
#[pyfunction]
pub(crate) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (major, minor, patch) = servekit_zmq::version();
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("commit", COMMIT.unwrap_or("unknown"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
    info.set_item("schema", format!("{SCHEMA:#018x}"))?;
    info.set_item("libzmq", format!("{major}.{minor}.{patch}"))?;
    Ok(info)
}

/// Whether libzmq was built with a capability, such as `curve`.
#[pyfunction]
pub(crate) fn zmq_has(capability: &str) -> bool {
    servekit_zmq::has(capability)
}

/// End this process, whatever it is doing, once nobody holds the other end of a pipe; remove `paths` before.
///
/// The descriptor belongs to the watching thread from now on. Exit status 1.
#[pyfunction]
#[pyo3(signature = (fd, paths=None))]
pub(crate) fn watch_death_pipe(fd: i32, paths: Option<Vec<PathBuf>>) -> PyResult<()> {
    if fd < 0 {
        return Err(SettingError::new_err(format!("{fd} is no descriptor")));
    }
    let watch = move || {
        wait_for_end(fd);
        for path in paths.iter().flatten() {
            remove(path);
        }
        exit_now(1);
    };
    std::thread::Builder::new()
        .name("death-pipe".to_owned())
        .spawn(watch)
        .map(drop)
        .map_err(|error| ResourceError::new_err(format!("can't start the thread death-pipe: {error}")))
}

/// Ask the kernel to send this process a signal when the thread that started it ends. Linux only; elsewhere nothing.
#[pyfunction]
#[expect(unsafe_code, reason = "prctl has no safe wrapper among the dependencies")]
pub(crate) fn set_parent_death_signal(signal: i32) -> PyResult<()> {
    if !(0..=64).contains(&signal) {
        return Err(SettingError::new_err(format!("{signal} is no signal")));
    }
    #[cfg(target_os = "linux")]
    // SAFETY: takes a number, touches no memory of this process.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong) } != 0 {
        return Err(ResourceError::new_err(format!("prctl: {}", std::io::Error::last_os_error())));
    }
    Ok(())
}

/// Reads until the end of the file; an error is an end, too.
#[expect(unsafe_code, reason = "the descriptor comes from Python as a number")]
fn wait_for_end(fd: i32) {
    let mut byte = 0u8;
    loop {
        // SAFETY: one byte to write to; a descriptor that is none is an error of the call.
        let read = unsafe { libc::read(fd, (&raw mut byte).cast(), 1) };
        let interrupted = std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted;
        if read == 0 || (read < 0 && !interrupted) {
            return;
        }
    }
}

fn remove(path: &Path) {
    // It may be gone already, and there is nobody left to tell: the process ends here.
    let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
}

#[expect(unsafe_code, reason = "exit handlers of libraries may wait for threads that hang")]
fn exit_now(status: i32) -> ! {
    // SAFETY: never returns and runs nothing.
    unsafe { libc::_exit(status) }
}
