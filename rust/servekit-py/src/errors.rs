//! From errors of the core to Python exceptions: the one table.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyIndexError, PyKeyError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use servekit_core::detok::VocabularyError;
use servekit_core::dispatch::DispatchError as CoreDispatchError;
use servekit_core::plane::PlaneError;
use servekit_core::state_page::StatePageError;
use servekit_core::wire::WireError;

create_exception!(servekit._core, ServekitError, PyException, "Base of the errors of this module.");
create_exception!(servekit._core, MalformedError, ServekitError, "Bytes that are no frame of this schema version.");
create_exception!(servekit._core, SettingError, ServekitError, "An argument that no call like this can take.");
create_exception!(servekit._core, DispatchError, ServekitError, "No rank can take the request.");
create_exception!(servekit._core, ResourceError, ServekitError, "A file, socket, segment or thread can't be had.");
create_exception!(servekit._core, PhaseError, ServekitError, "It was not started yet, or is closed already.");
create_exception!(servekit._core, SilentError, ServekitError, "A thread did not answer in time.");

/// Errors that are of this family and what Python calls such a thing, too.
static ROW_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static COLUMN_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The exception for a row that a batch does not have: an `IndexError`.
pub(crate) fn row_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let builtin = py.get_type::<PyIndexError>();
    family_error(&ROW_ERROR, builtin, "RowError", "A row that the batch does not have.")
}

/// The exception for a column that a batch does not have: a `KeyError`.
pub(crate) fn column_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let builtin = py.get_type::<PyKeyError>();
    family_error(&COLUMN_ERROR, builtin, "ColumnError", "A column that the batch does not have.")
}

fn family_error<'py>(
    cell: &'static PyOnceLock<Py<PyType>>,
    builtin: Bound<'py, PyType>,
    name: &str,
    doc: &str,
) -> PyResult<&'py Bound<'py, PyType>> {
    let py = builtin.py();
    let make = || {
        let bases = PyTuple::new(py, [py.get_type::<ServekitError>(), builtin])?;
        let members = PyDict::new(py);
        members.set_item("__module__", "servekit._core")?;
        members.set_item("__doc__", doc)?;
        Ok::<_, PyErr>(py.get_type::<PyType>().call1((name, bases, members))?.cast_into::<PyType>()?.unbind())
    };
    Ok(cell.get_or_try_init(py, make)?.bind(py))
}

/// An exception of a type that may not have been made.
fn raise(kind: impl FnOnce(Python<'_>) -> PyResult<&Bound<'_, PyType>>, message: String) -> PyErr {
    Python::attach(|py| match kind(py) {
        Ok(kind) => PyErr::from_type(kind.clone(), message),
        Err(error) => error,
    })
}

/// Any error of the core.
pub(crate) enum Error {
    /// Bytes from a peer.
    Wire(WireError),
    /// A tokenizer file.
    Vocabulary(VocabularyError),
    /// A choice of rank.
    Dispatch(CoreDispatchError),
    /// The state page.
    StatePage(StatePageError),
    /// The threads of the control process.
    Plane(PlaneError),
    /// A socket.
    Zmq(servekit_zmq::Error),
}

macro_rules! from {
    ($($error:ty => $variant:ident,)*) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(error)
            }
        })*
    };
}

from! {
    WireError => Wire,
    VocabularyError => Vocabulary,
    CoreDispatchError => Dispatch,
    StatePageError => StatePage,
    PlaneError => Plane,
    servekit_zmq::Error => Zmq,
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Wire(error) => match &error {
                WireError::Short { .. }
                | WireError::Magic(_)
                | WireError::Version(_)
                | WireError::Length { .. }
                | WireError::Kind(_)
                | WireError::Extension { .. }
                | WireError::Body { .. }
                | WireError::Merge { .. } => MalformedError::new_err(error.to_string()),
                WireError::Row { .. } => raise(row_error, error.to_string()),
                WireError::Column(_) => raise(column_error, error.to_string()),
            },
            Error::Vocabulary(error) => ResourceError::new_err(error.to_string()),
            Error::Dispatch(error) => match &error {
                CoreDispatchError::UnknownMethod(_) => SettingError::new_err(error.to_string()),
                CoreDispatchError::NoActiveRank
                | CoreDispatchError::RankInactive(_)
                | CoreDispatchError::NoSuchRank { .. }
                | CoreDispatchError::NoRoom => DispatchError::new_err(error.to_string()),
            },
            Error::StatePage(error) => match &error {
                StatePageError::Io { .. } => ResourceError::new_err(error.to_string()),
                StatePageError::Invalid { .. } => SettingError::new_err(error.to_string()),
            },
            Error::Plane(error) => match &error {
                PlaneError::Config(_) => SettingError::new_err(error.to_string()),
                PlaneError::Socket { .. }
                | PlaneError::StatePage(_)
                | PlaneError::Tokenizer(_)
                | PlaneError::Thread(_) => ResourceError::new_err(error.to_string()),
                PlaneError::State(_) => PhaseError::new_err(error.to_string()),
                PlaneError::Silent(_) => SilentError::new_err(error.to_string()),
            },
            Error::Zmq(error) => ResourceError::new_err(error.to_string()),
        }
    }
}

/// A time in seconds that a caller gave.
///
/// # Errors
/// It is negative or no number.
pub(crate) fn seconds(name: &str, value: f64) -> PyResult<std::time::Duration> {
    // Beyond a year it makes no difference; it keeps deadlines inside the clock's range.
    const YEAR: f64 = 31_536_000.0;
    std::time::Duration::try_from_secs_f64(if value > YEAR { YEAR } else { value })
        .map_err(|_| SettingError::new_err(format!("{name} is {value}, must be seconds from 0")))
}
