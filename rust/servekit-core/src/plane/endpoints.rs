//! Where the sockets are that control binds.

use std::path::Path;

/// Addresses of the sockets that peers connect to: `ipc:///path` or `tcp://127.0.0.1:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// What workers send to.
    pub ingress: String,
    /// What ranks send to.
    pub egress: String,
    /// What each rank receives from.
    pub ranks: Vec<String>,
}

impl Endpoints {
    /// Those of a server: sockets in its run directory.
    pub fn in_folder(run_dir: &Path, ranks: usize) -> Self {
        let address = |name: &str| format!("ipc://{}", run_dir.join(name).display());
        Self {
            ingress: address("ingress.ipc"),
            egress: address("egress.ipc"),
            ranks: (0..ranks).map(|rank| address(&format!("rank{rank}.ipc"))).collect(),
        }
    }

    /// The first address that leads off this machine or anywhere strange, if one does: what arrives is obeyed, so only
    /// processes of this machine may send it.
    pub(super) fn foreign(&self) -> Option<&str> {
        let all = [&self.ingress, &self.egress].into_iter().chain(&self.ranks);
        all.map(String::as_str).find(|address| !is_local(address))
    }
}

/// Whether an address is met by processes of this machine alone.
pub(super) fn is_local(address: &str) -> bool {
    address.starts_with("ipc://") || address.starts_with("tcp://127.0.0.1:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_off_this_machine_are_found() {
        let mut endpoints = Endpoints::in_folder(Path::new("/run/x"), 2);
        assert_eq!(endpoints.ranks, ["ipc:///run/x/rank0.ipc", "ipc:///run/x/rank1.ipc"]);
        endpoints.egress = "tcp://127.0.0.1:7000".to_owned();
        assert_eq!(endpoints.foreign(), None);
        for foreign in ["tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://127.0.0.1.example.org:1", "inproc://x", ""] {
            endpoints.ranks[1] = foreign.to_owned();
            assert_eq!(endpoints.foreign(), Some(foreign));
        }
    }
}
