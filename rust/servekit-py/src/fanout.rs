//! The sockets to HTTP workers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use servekit_core::fanout::{MAX_UNACKNOWLEDGED, RETRY, Sent, SocketMapping as Mapping};
use servekit_core::wire::{Envelope, Rid};

use crate::errors::{Error, SettingError};
use crate::process::build_name;

/// Sends to HTTP workers; connects to one when the first message for it comes, only to sockets in the run directory.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct SocketMapping {
    mapping: Arc<Mutex<Mapping>>,
    /// Tells a thread that something waits.
    waits: SyncSender<()>,
}

/// Sends on what workers did not take at once, for callers who may not call again. It ends with the mapping.
fn keep_sending(mapping: &Weak<Mutex<Mapping>>, waits: &Receiver<()>) {
    while waits.recv().is_ok() {
        while mapping.upgrade().is_some_and(|mapping| !mapping.lock().flush()) {
            std::thread::sleep(RETRY);
        }
    }
}

#[pymethods]
impl SocketMapping {
    /// `worker_epochs` holds the present life of each worker, from 1; without it, any worker is sent to.
    #[new]
    #[pyo3(signature = (run_dir, worker_epochs=None, epoch=1, max_unacknowledged=MAX_UNACKNOWLEDGED))]
    fn new(run_dir: PathBuf, worker_epochs: Option<Vec<u32>>, epoch: u32, max_unacknowledged: usize) -> PyResult<Self> {
        let build = build_name();
        let mapping = match worker_epochs {
            None => Mapping::open(&run_dir, epoch, &build),
            Some(epochs) if epochs.is_empty() || epochs.len() > 4096 || epochs.contains(&0) => {
                return Err(SettingError::new_err("worker_epochs must hold 1 to 4096 numbers from 1"));
            }
            Some(epochs) => Mapping::new(&run_dir, epoch, &build, &epochs),
        };
        let mapping = Arc::new(Mutex::new(mapping.with_most_unacknowledged(max_unacknowledged)));
        let (waits, told) = sync_channel(1);
        let kept = Arc::downgrade(&mapping);
        std::thread::Builder::new().name("fanout".to_owned()).spawn(move || keep_sending(&kept, &told))?;
        Ok(Self { mapping, waits })
    }

    /// Send a message to the worker that a request id leads back to; True if it is on its way, False if the worker
    /// reads too slowly or that life of it is over. Never waits.
    fn send_output(&self, py: Python<'_>, rid: u64, envelope: &[u8], body: &[u8]) -> PyResult<bool> {
        Envelope::parse(envelope).map_err(Error::from)?;
        let (sent, all) = py.detach(|| {
            let mut mapping = self.mapping.lock();
            (mapping.send_output(Rid(rid).route(), &[envelope, body]), mapping.flush())
        });
        if !all {
            // Full means that the thread has been told.
            let _ = self.waits.try_send(());
        }
        match sent {
            Sent::Yes => Ok(true),
            Sent::Cut | Sent::Lost | Sent::NoRoute => Ok(false),
        }
    }

    /// The worker of a request id has handled all messages up to that number; False if it was never sent so many.
    fn acknowledge(&self, py: Python<'_>, rid: u64, number: u64) -> bool {
        py.detach(|| self.mapping.lock().acknowledge(Rid(rid).route(), number))
    }

    /// Close a worker's socket and send nothing to this life of it any more.
    fn remove(&self, py: Python<'_>, worker: u16) {
        py.detach(|| self.mapping.lock().remove(worker));
    }

    /// Close every socket; the next message for a worker connects again.
    fn clear_all_sockets(&self, py: Python<'_>) {
        py.detach(|| self.mapping.lock().clear_all_sockets());
    }

    /// Open sockets.
    fn __len__(&self) -> usize {
        self.mapping.lock().len()
    }

    /// What went to each worker that anything was meant for.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<BTreeMap<usize, Bound<'py, PyDict>>> {
        let counters = py.detach(|| self.mapping.lock().counters());
        let mut workers = BTreeMap::new();
        for (worker, peer) in counters.iter().enumerate() {
            let named = peer.named();
            if named.iter().any(|(_, count)| *count > 0) {
                let dict = PyDict::new(py);
                named.iter().try_for_each(|(name, count)| dict.set_item(name, count))?;
                workers.insert(worker, dict);
            }
        }
        Ok(workers)
    }
}
