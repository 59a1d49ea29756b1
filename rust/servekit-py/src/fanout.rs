//! The sockets to HTTP workers.

use std::collections::BTreeMap;
use std::path::PathBuf;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use servekit_core::fanout::{MAX_UNACKNOWLEDGED, Sent, SocketMapping as Mapping};
use servekit_core::wire::{Envelope, Rid};
use servekit_zmq::{Context, Message};

use crate::errors::{Error, SettingError};
use crate::process::build_name;

/// Sockets of a mapping that any worker may join: one for each that a request id can name, and as many to spare.
const MAX_SOCKETS: i32 = 8192;

/// Sends to HTTP workers; connects to one when the first message for it comes, only to sockets in the run directory.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct SocketMapping(Mutex<Mapping>);

#[pymethods]
impl SocketMapping {
    /// `worker_epochs` holds the present life of each worker, from 1; without it, any worker is sent to.
    #[new]
    #[pyo3(signature = (run_dir, worker_epochs=None, epoch=1, max_unacknowledged=MAX_UNACKNOWLEDGED))]
    fn new(run_dir: PathBuf, worker_epochs: Option<Vec<u32>>, epoch: u32, max_unacknowledged: usize) -> PyResult<Self> {
        let (context, build) = (Context::new(), build_name());
        let mapping = match worker_epochs {
            None => {
                context.set_max_sockets(MAX_SOCKETS).map_err(Error::from)?;
                Mapping::open(context, &run_dir, epoch, &build)
            }
            Some(epochs) if epochs.is_empty() || epochs.len() > 4096 || epochs.contains(&0) => {
                return Err(SettingError::new_err("worker_epochs must hold 1 to 4096 numbers from 1"));
            }
            Some(epochs) => Mapping::new(context, &run_dir, epoch, &build, &epochs),
        };
        Ok(Self(Mutex::new(mapping.with_most_unacknowledged(max_unacknowledged))))
    }

    /// Send a message to the worker that a request id leads back to; True if it is on its way, False if the worker
    /// reads too slowly or that life of it is over. Never waits.
    fn send_output(&self, py: Python<'_>, rid: u64, envelope: &[u8], body: &[u8]) -> PyResult<bool> {
        Envelope::parse(envelope).map_err(Error::from)?;
        let frames = vec![Message::copy_of(envelope), Message::copy_of(body)];
        let sent = py.detach(|| self.0.lock().send_output(Rid(rid).route(), frames)).map_err(Error::from)?;
        match sent {
            Sent::Yes => Ok(true),
            Sent::Cut | Sent::Lost | Sent::NoRoute => Ok(false),
        }
    }

    /// The worker of a request id has handled all messages up to that number; False if it was never sent so many.
    fn acknowledge(&self, py: Python<'_>, rid: u64, number: u64) -> bool {
        py.detach(|| self.0.lock().acknowledge(Rid(rid).route(), number))
    }

    /// Close a worker's socket and send nothing to this life of it any more.
    fn remove(&self, py: Python<'_>, worker: u16) {
        py.detach(|| self.0.lock().remove(worker));
    }

    /// Close every socket; the next message for a worker connects again.
    fn clear_all_sockets(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().clear_all_sockets());
    }

    /// Open sockets.
    fn __len__(&self) -> usize {
        self.0.lock().len()
    }

    /// What went to each worker that anything was meant for.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<BTreeMap<usize, Bound<'py, PyDict>>> {
        let counters = py.detach(|| self.0.lock().counters());
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
