//! What parses as an envelope is written again as the same bytes, but for padding.

use servekit_core::wire::{Envelope, EnvelopeBuilder, patch_request};

/// Takes any bytes.
///
/// # Panics
/// They show a fault.
pub fn run(data: &[u8]) {
    let mut frame = data.to_vec();
    patch_request(&mut frame, 1, 2, 3, 4, 5);
    let _ = Envelope::parse(&frame);
    let Ok(envelope) = Envelope::parse(data) else { return };
    let rebuilt = EnvelopeBuilder {
        flags: envelope.flags,
        sender: envelope.sender,
        sender_epoch: envelope.sender_epoch,
        receiver_epoch: envelope.receiver_epoch,
        seq: envelope.seq,
        id: envelope.id,
        exts: envelope.exts().map(|(kind, data)| (kind, data.to_vec())).collect(),
        ..EnvelopeBuilder::new(envelope.kind, envelope.section)
    }
    .encode();
    let again = Envelope::parse(&rebuilt).unwrap();
    assert_eq!(rebuilt.len(), data.len());
    assert_eq!((again.id, again.section), (envelope.id, envelope.section));
    assert!(again.exts().eq(envelope.exts()));
}
