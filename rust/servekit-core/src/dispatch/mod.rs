//! Which data-parallel rank takes a request.

mod budget;
mod method;

pub use budget::{Dispatched, DpBudget, RankBudget, Report};
pub use method::{DispatchError, LoadBalanceMethod};
