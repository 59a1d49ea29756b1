//! The Python module `servekit._core`: the core's parts under the same names.

mod controller;
mod detok;
mod dispatch;
mod encode;
mod errors;
mod fanout;
mod kernels;
mod plane;
mod process;
mod pulse;
mod report;
mod router;
mod split;
mod sse;
mod state_page;
mod wire;

use pyo3::prelude::*;

/// The control plane of servekit.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("RowError", crate::errors::row_error(module.py())?)?;
        module.add("ColumnError", crate::errors::column_error(module.py())?)
    }

    #[pymodule_export]
    use crate::controller::DataParallelController;
    #[pymodule_export]
    use crate::detok::Detokenizer;
    #[pymodule_export]
    use crate::dispatch::{DPBudget, LoadBalanceMethod, prefix_hashes};
    #[pymodule_export]
    use crate::encode::Encoder;
    #[pymodule_export]
    use crate::errors::{
        DispatchError, MalformedError, PhaseError, ResourceError, ServekitError, SettingError, SilentError,
    };
    #[pymodule_export]
    use crate::fanout::SocketMapping;
    #[pymodule_export]
    use crate::kernels::{DecoderLayers, KernelPool, PagedAttention, StoredMatrix};
    #[pymodule_export]
    use crate::plane::ControlPlane;
    #[pymodule_export]
    use crate::process::{build_info, set_parent_death_signal, watch_death_pipe, zmq_has};
    #[pymodule_export]
    use crate::pulse::Pulse;
    #[pymodule_export]
    use crate::report::RankReport;
    #[pymodule_export]
    use crate::router::MultiTokenizerRouter;
    #[pymodule_export]
    use crate::split::{
        extract_field_by_index, handle_output_by_index, merge_batches, split_batch, split_batch_by_name,
    };
    #[pymodule_export]
    use crate::sse::{TextStreams, escape_json};
    #[pymodule_export]
    use crate::state_page::StatePage;
    #[pymodule_export]
    use crate::wire::{parse_envelope, parse_group, parse_text_options, schema_hash};
}
