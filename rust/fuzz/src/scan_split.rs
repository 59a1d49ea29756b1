//! What scans as a batch splits into batches that scan and that merge into a batch with the same rows.

use std::sync::Arc;

use servekit_core::split::{extract_field_by_index, handle_output_by_index, merge, split_by_name, split_by_worker};
use servekit_core::wire::{Kind, ScannedBatch};

/// Takes any bytes.
///
/// # Panics
/// They show a fault.
pub fn run(data: &[u8]) {
    let Some((&first, body)) = data.split_first() else { return };
    let kind = [Kind::BatchTokenId, Kind::BatchStr, Kind::BatchEmbedding][usize::from(first % 3)];
    let Ok(batch) = ScannedBatch::parse(kind, Arc::new(body.to_vec())) else { return };
    let _ = split_by_name(&batch);
    let mut singles = Vec::new();
    for row in 0..batch.rows().min(16) {
        let single = ScannedBatch::parse(kind, Arc::new(handle_output_by_index(&batch, row).unwrap())).unwrap();
        assert_eq!((single.rid(0), single.finish_type(0)), (batch.rid(row), batch.finish_type(row)));
        singles.push(single);
        for column in batch.columns() {
            extract_field_by_index(&batch, column.name, row).unwrap();
        }
    }
    let parts: Vec<_> =
        split_by_worker(&batch).into_iter().map(|part| ScannedBatch::parse(kind, part.body).unwrap()).collect();
    assert_eq!(parts.iter().map(ScannedBatch::rows).sum::<usize>(), batch.rows());
    let positions: Vec<_> = (0..singles.len() as u32).map(|place| vec![place]).collect();
    if let Ok(merged) = merge(&singles, &positions) {
        let merged = ScannedBatch::parse(kind, Arc::new(merged)).unwrap();
        assert_eq!(merged.rids(), &batch.rids()[..singles.len()]);
    }
}
