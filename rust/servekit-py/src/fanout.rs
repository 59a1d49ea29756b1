//! The sockets to HTTP workers.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use servekit_core::fanout::{Sent, SocketMapping as Mapping};
use servekit_core::wire::{Envelope, Rid};
use servekit_zmq::{Context, Message};

use crate::errors::{Error, SettingError};
use crate::process::build_name;

/// Sends to HTTP workers; connects to one when the first message for it comes, only to sockets in the run directory.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct SocketMapping(Mutex<Mapping>);

#[pymethods]
impl SocketMapping {
    /// `worker_epochs` holds the present life of each worker, from 1.
    #[new]
    #[pyo3(signature = (run_dir, worker_epochs, epoch=1))]
    fn new(run_dir: PathBuf, worker_epochs: Vec<u32>, epoch: u32) -> PyResult<Self> {
        if worker_epochs.is_empty() || worker_epochs.len() > 4096 || worker_epochs.contains(&0) {
            return Err(SettingError::new_err("worker_epochs must hold 1 to 4096 numbers from 1"));
        }
        Ok(Self(Mutex::new(Mapping::new(Context::new(), &run_dir, epoch, &build_name(), &worker_epochs))))
    }

    /// Send a message to the worker that a request id leads back to; True if it is on its way, False if the worker
    /// reads too slowly or that life of it is over. Never waits.
    fn send_output(&self, py: Python<'_>, rid: u64, envelope: &[u8], body: &[u8]) -> PyResult<bool> {
        Envelope::parse(envelope).map_err(Error::from)?;
        let (envelope, body) = (envelope.to_vec(), vec![Message::copy_of(body)]);
        let sent = py.detach(|| self.0.lock().send_output(Rid(rid).route(), envelope, body)).map_err(Error::from)?;
        match sent {
            Sent::Yes => Ok(true),
            Sent::Cut | Sent::Lost | Sent::NoRoute => Ok(false),
        }
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

    /// For each worker: messages, bytes, lost, cuts, unroutable.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let counters = self.0.lock().counters();
        let plain = counters.iter().map(|peer| {
            let dict = PyDict::new(py);
            for (name, value) in [
                ("messages", &peer.messages),
                ("bytes", &peer.bytes),
                ("lost", &peer.lost),
                ("cuts", &peer.cuts),
                ("unroutable", &peer.unroutable),
            ] {
                dict.set_item(name, value.load(Ordering::Relaxed))?;
            }
            Ok(dict)
        });
        plain.collect()
    }
}
