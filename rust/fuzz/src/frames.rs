//! Any message of a worker or a rank becomes an event, and the router does something about it and keeps its table.

use std::time::Duration;

use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::router::frames::{FromRank, NoRows, from_rank, from_worker};
use servekit_core::router::{Core, CoreConfig, Event, Rows};
use servekit_core::wire::{Kind, SCHEMA};
use servekit_zmq::Message;

/// Takes any bytes: messages, each with its side, the lengths of its envelope and its body (u16), and their bytes.
///
/// # Panics
/// They show a fault.
pub fn run(mut data: &[u8]) {
    let mut core = Core::new(CoreConfig {
        epoch: 1,
        schema: SCHEMA,
        method: LoadBalanceMethod::RoundRobin,
        rank_epochs: vec![1; 2],
        worker_epochs: vec![1; 2],
        rank_wait: Duration::from_secs(1),
        max_queued: 8,
        max_queued_tokens: 1 << 20,
        max_per_worker: usize::MAX,
        resume_memory: 1 << 10,
    });
    let mut actions = Vec::new();
    for rank in 0..2 {
        let up = Event::RankState { rank, epoch: None, active: true, reason: String::new(), max_running: 4 };
        core.handle(up, 0, &mut actions);
    }
    for now in 1.. {
        let Some((&[side, head, head_high, body, body_high], rest)) = data.split_first_chunk::<5>() else { break };
        let head = usize::from(u16::from_le_bytes([head, head_high])).min(rest.len());
        let body = usize::from(u16::from_le_bytes([body, body_high])).min(rest.len() - head);
        let mut envelope = rest[..head].to_vec();
        // Fields that a search would have to guess all at once.
        if side & 2 != 0 && head >= 40 {
            envelope[..4].copy_from_slice(&(head as u32).to_le_bytes());
            envelope[4..10].copy_from_slice(b"SVK1\x01\x00");
        }
        if side & 4 != 0 && head >= 48 && envelope[10] == Kind::Hello as u8 {
            envelope[40..48].copy_from_slice(&SCHEMA.to_le_bytes());
        }
        let frames = vec![Message::copy_of(&envelope), Message::copy_of(&rest[head..head + body])];
        data = &rest[head + body..];
        if side & 1 == 0 {
            match from_worker(frames) {
                // A peer of another build ends the start; here it would end the search.
                Event::Hello { schema, .. } if schema != SCHEMA => {}
                event => core.handle(event, now, &mut actions),
            }
        } else {
            match from_rank(frames) {
                FromRank::Event(event) => core.handle(*event, now, &mut actions),
                FromRank::Batch { from, last_dispatch, load, rows } => {
                    let rows: Result<&dyn Rows, String> = match &rows {
                        Ok(Some(batch)) => Ok(&**batch),
                        Ok(None) => Ok(&NoRows),
                        Err(reason) => Err(reason.clone()),
                    };
                    core.handle(Event::Batch { from, last_dispatch, load, rows }, now, &mut actions);
                }
            }
        }
        assert!(core.in_flight() <= 2 * 4 + 8);
        actions.clear();
    }
    core.handle(Event::FailAll { message: "the end".to_owned() }, u64::MAX, &mut actions);
    assert_eq!((core.in_flight(), core.waiting()), (0, 0));
    let unseen: u64 = core.budget().ranks().iter().map(|rank| rank.unseen_tokens()).sum();
    assert_eq!((unseen, core.kept_bytes()), (0, 0));
}
