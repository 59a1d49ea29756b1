//! Columns of each kind of batch. Made by `python -m servekit.messages.columns --write`; not edited by hand.

use super::column::{Carry, Column, ColumnKind, column};

/// Hash of all message definitions, as HELLO carries it.
pub const SCHEMA: u64 = 0x2d32_ad9f_50ba_a12b;

/// `BatchTokenIDOutput`.
pub mod batch_token_id {
    use super::{Carry, Column, ColumnKind, column};

    /// First element of the body.
    pub const TAG: &str = "BatchTokenIDOutput";

    /// In the order of the body.
    pub const COLUMNS: &[Column] = &[
        column("rids", ColumnKind::List, Carry::Own),
        column("http_worker_ipcs", ColumnKind::List, Carry::Newest),
        column("finished_reasons", ColumnKind::List, Carry::Own),
        column("prompt_tokens", ColumnKind::List, Carry::Newest),
        column("completion_tokens", ColumnKind::List, Carry::Own),
        column("cached_tokens", ColumnKind::List, Carry::Newest),
        column("retraction_counts", ColumnKind::List, Carry::Newest),
        column("dp_ranks", ColumnKind::List, Carry::Newest),
        column("decode_ids", ColumnKind::Ragged, Carry::Own),
        column("output_ids", ColumnKind::Ragged, Carry::Own),
        column("decoded_texts", ColumnKind::List, Carry::Newest),
        column("read_offsets", ColumnKind::List, Carry::Newest),
        column("skip_special_tokens", ColumnKind::List, Carry::Newest),
        column("spaces_between_special_tokens", ColumnKind::List, Carry::Newest),
        column("no_stop_trim", ColumnKind::List, Carry::Newest),
        column("spec_verify_ct", ColumnKind::ListOrEmpty, Carry::Newest),
        column("spec_accepted_tokens", ColumnKind::ListOrEmpty, Carry::Newest),
        column("input_token_logprobs_val", ColumnKind::RaggedShort, Carry::Once),
        column("input_token_logprobs_idx", ColumnKind::RaggedShort, Carry::Once),
        column("output_token_logprobs_val", ColumnKind::RaggedShort, Carry::PerToken),
        column("output_token_logprobs_idx", ColumnKind::RaggedShort, Carry::PerToken),
        column("input_top_logprobs_val", ColumnKind::NestedShort, Carry::Once),
        column("input_top_logprobs_idx", ColumnKind::NestedShort, Carry::Once),
        column("output_top_logprobs_val", ColumnKind::NestedShort, Carry::PerToken),
        column("output_top_logprobs_idx", ColumnKind::NestedShort, Carry::PerToken),
        column("input_token_ids_logprobs_val", ColumnKind::NestedShort, Carry::Once),
        column("input_token_ids_logprobs_idx", ColumnKind::NestedShort, Carry::Once),
        column("output_token_ids_logprobs_val", ColumnKind::NestedShort, Carry::PerToken),
        column("output_token_ids_logprobs_idx", ColumnKind::NestedShort, Carry::PerToken),
        column("output_hidden_states", ColumnKind::Nested, Carry::Appended),
        column("customized_info", ColumnKind::DictOfLists, Carry::Newest),
        column("time_stats", ColumnKind::DictOfLists, Carry::Newest),
        column("load", ColumnKind::Shared, Carry::Newest),
    ];
    /// Place of `rids` in `COLUMNS`.
    pub const RIDS: usize = 0;
    /// Place of `http_worker_ipcs` in `COLUMNS`.
    pub const HTTP_WORKER_IPCS: usize = 1;
    /// Place of `finished_reasons` in `COLUMNS`.
    pub const FINISHED_REASONS: usize = 2;
    /// Place of `prompt_tokens` in `COLUMNS`.
    pub const PROMPT_TOKENS: usize = 3;
    /// Place of `completion_tokens` in `COLUMNS`.
    pub const COMPLETION_TOKENS: usize = 4;
    /// Place of `cached_tokens` in `COLUMNS`.
    pub const CACHED_TOKENS: usize = 5;
    /// Place of `retraction_counts` in `COLUMNS`.
    pub const RETRACTION_COUNTS: usize = 6;
    /// Place of `dp_ranks` in `COLUMNS`.
    pub const DP_RANKS: usize = 7;
    /// Place of `decode_ids` in `COLUMNS`.
    pub const DECODE_IDS: usize = 8;
    /// Place of `output_ids` in `COLUMNS`.
    pub const OUTPUT_IDS: usize = 9;
    /// Place of `decoded_texts` in `COLUMNS`.
    pub const DECODED_TEXTS: usize = 10;
    /// Place of `read_offsets` in `COLUMNS`.
    pub const READ_OFFSETS: usize = 11;
    /// Place of `skip_special_tokens` in `COLUMNS`.
    pub const SKIP_SPECIAL_TOKENS: usize = 12;
    /// Place of `spaces_between_special_tokens` in `COLUMNS`.
    pub const SPACES_BETWEEN_SPECIAL_TOKENS: usize = 13;
    /// Place of `no_stop_trim` in `COLUMNS`.
    pub const NO_STOP_TRIM: usize = 14;
    /// Place of `spec_verify_ct` in `COLUMNS`.
    pub const SPEC_VERIFY_CT: usize = 15;
    /// Place of `spec_accepted_tokens` in `COLUMNS`.
    pub const SPEC_ACCEPTED_TOKENS: usize = 16;
    /// Place of `input_token_logprobs_val` in `COLUMNS`.
    pub const INPUT_TOKEN_LOGPROBS_VAL: usize = 17;
    /// Place of `input_token_logprobs_idx` in `COLUMNS`.
    pub const INPUT_TOKEN_LOGPROBS_IDX: usize = 18;
    /// Place of `output_token_logprobs_val` in `COLUMNS`.
    pub const OUTPUT_TOKEN_LOGPROBS_VAL: usize = 19;
    /// Place of `output_token_logprobs_idx` in `COLUMNS`.
    pub const OUTPUT_TOKEN_LOGPROBS_IDX: usize = 20;
    /// Place of `input_top_logprobs_val` in `COLUMNS`.
    pub const INPUT_TOP_LOGPROBS_VAL: usize = 21;
    /// Place of `input_top_logprobs_idx` in `COLUMNS`.
    pub const INPUT_TOP_LOGPROBS_IDX: usize = 22;
    /// Place of `output_top_logprobs_val` in `COLUMNS`.
    pub const OUTPUT_TOP_LOGPROBS_VAL: usize = 23;
    /// Place of `output_top_logprobs_idx` in `COLUMNS`.
    pub const OUTPUT_TOP_LOGPROBS_IDX: usize = 24;
    /// Place of `input_token_ids_logprobs_val` in `COLUMNS`.
    pub const INPUT_TOKEN_IDS_LOGPROBS_VAL: usize = 25;
    /// Place of `input_token_ids_logprobs_idx` in `COLUMNS`.
    pub const INPUT_TOKEN_IDS_LOGPROBS_IDX: usize = 26;
    /// Place of `output_token_ids_logprobs_val` in `COLUMNS`.
    pub const OUTPUT_TOKEN_IDS_LOGPROBS_VAL: usize = 27;
    /// Place of `output_token_ids_logprobs_idx` in `COLUMNS`.
    pub const OUTPUT_TOKEN_IDS_LOGPROBS_IDX: usize = 28;
    /// Place of `output_hidden_states` in `COLUMNS`.
    pub const OUTPUT_HIDDEN_STATES: usize = 29;
    /// Place of `customized_info` in `COLUMNS`.
    pub const CUSTOMIZED_INFO: usize = 30;
    /// Place of `time_stats` in `COLUMNS`.
    pub const TIME_STATS: usize = 31;
    /// Place of `load` in `COLUMNS`.
    pub const LOAD: usize = 32;
}

/// `BatchStrOutput`.
pub mod batch_str {
    use super::{Carry, Column, ColumnKind, column};

    /// First element of the body.
    pub const TAG: &str = "BatchStrOutput";

    /// In the order of the body.
    pub const COLUMNS: &[Column] = &[
        column("rids", ColumnKind::List, Carry::Own),
        column("http_worker_ipcs", ColumnKind::List, Carry::Newest),
        column("finished_reasons", ColumnKind::List, Carry::Own),
        column("prompt_tokens", ColumnKind::List, Carry::Newest),
        column("completion_tokens", ColumnKind::List, Carry::Own),
        column("cached_tokens", ColumnKind::List, Carry::Newest),
        column("retraction_counts", ColumnKind::List, Carry::Newest),
        column("dp_ranks", ColumnKind::List, Carry::Newest),
        column("output_strs", ColumnKind::List, Carry::Own),
        column("output_ids", ColumnKind::Ragged, Carry::Own),
        column("spec_verify_ct", ColumnKind::ListOrEmpty, Carry::Newest),
        column("spec_accepted_tokens", ColumnKind::ListOrEmpty, Carry::Newest),
        column("input_token_logprobs_val", ColumnKind::RaggedShort, Carry::Once),
        column("input_token_logprobs_idx", ColumnKind::RaggedShort, Carry::Once),
        column("output_token_logprobs_val", ColumnKind::RaggedShort, Carry::PerToken),
        column("output_token_logprobs_idx", ColumnKind::RaggedShort, Carry::PerToken),
        column("input_top_logprobs_val", ColumnKind::NestedShort, Carry::Once),
        column("input_top_logprobs_idx", ColumnKind::NestedShort, Carry::Once),
        column("output_top_logprobs_val", ColumnKind::NestedShort, Carry::PerToken),
        column("output_top_logprobs_idx", ColumnKind::NestedShort, Carry::PerToken),
        column("input_token_ids_logprobs_val", ColumnKind::NestedShort, Carry::Once),
        column("input_token_ids_logprobs_idx", ColumnKind::NestedShort, Carry::Once),
        column("output_token_ids_logprobs_val", ColumnKind::NestedShort, Carry::PerToken),
        column("output_token_ids_logprobs_idx", ColumnKind::NestedShort, Carry::PerToken),
        column("output_hidden_states", ColumnKind::Nested, Carry::Appended),
        column("customized_info", ColumnKind::DictOfLists, Carry::Newest),
        column("time_stats", ColumnKind::DictOfLists, Carry::Newest),
    ];
    /// Place of `rids` in `COLUMNS`.
    pub const RIDS: usize = 0;
    /// Place of `http_worker_ipcs` in `COLUMNS`.
    pub const HTTP_WORKER_IPCS: usize = 1;
    /// Place of `finished_reasons` in `COLUMNS`.
    pub const FINISHED_REASONS: usize = 2;
    /// Place of `prompt_tokens` in `COLUMNS`.
    pub const PROMPT_TOKENS: usize = 3;
    /// Place of `completion_tokens` in `COLUMNS`.
    pub const COMPLETION_TOKENS: usize = 4;
    /// Place of `cached_tokens` in `COLUMNS`.
    pub const CACHED_TOKENS: usize = 5;
    /// Place of `retraction_counts` in `COLUMNS`.
    pub const RETRACTION_COUNTS: usize = 6;
    /// Place of `dp_ranks` in `COLUMNS`.
    pub const DP_RANKS: usize = 7;
    /// Place of `output_strs` in `COLUMNS`.
    pub const OUTPUT_STRS: usize = 8;
    /// Place of `output_ids` in `COLUMNS`.
    pub const OUTPUT_IDS: usize = 9;
    /// Place of `spec_verify_ct` in `COLUMNS`.
    pub const SPEC_VERIFY_CT: usize = 10;
    /// Place of `spec_accepted_tokens` in `COLUMNS`.
    pub const SPEC_ACCEPTED_TOKENS: usize = 11;
    /// Place of `input_token_logprobs_val` in `COLUMNS`.
    pub const INPUT_TOKEN_LOGPROBS_VAL: usize = 12;
    /// Place of `input_token_logprobs_idx` in `COLUMNS`.
    pub const INPUT_TOKEN_LOGPROBS_IDX: usize = 13;
    /// Place of `output_token_logprobs_val` in `COLUMNS`.
    pub const OUTPUT_TOKEN_LOGPROBS_VAL: usize = 14;
    /// Place of `output_token_logprobs_idx` in `COLUMNS`.
    pub const OUTPUT_TOKEN_LOGPROBS_IDX: usize = 15;
    /// Place of `input_top_logprobs_val` in `COLUMNS`.
    pub const INPUT_TOP_LOGPROBS_VAL: usize = 16;
    /// Place of `input_top_logprobs_idx` in `COLUMNS`.
    pub const INPUT_TOP_LOGPROBS_IDX: usize = 17;
    /// Place of `output_top_logprobs_val` in `COLUMNS`.
    pub const OUTPUT_TOP_LOGPROBS_VAL: usize = 18;
    /// Place of `output_top_logprobs_idx` in `COLUMNS`.
    pub const OUTPUT_TOP_LOGPROBS_IDX: usize = 19;
    /// Place of `input_token_ids_logprobs_val` in `COLUMNS`.
    pub const INPUT_TOKEN_IDS_LOGPROBS_VAL: usize = 20;
    /// Place of `input_token_ids_logprobs_idx` in `COLUMNS`.
    pub const INPUT_TOKEN_IDS_LOGPROBS_IDX: usize = 21;
    /// Place of `output_token_ids_logprobs_val` in `COLUMNS`.
    pub const OUTPUT_TOKEN_IDS_LOGPROBS_VAL: usize = 22;
    /// Place of `output_token_ids_logprobs_idx` in `COLUMNS`.
    pub const OUTPUT_TOKEN_IDS_LOGPROBS_IDX: usize = 23;
    /// Place of `output_hidden_states` in `COLUMNS`.
    pub const OUTPUT_HIDDEN_STATES: usize = 24;
    /// Place of `customized_info` in `COLUMNS`.
    pub const CUSTOMIZED_INFO: usize = 25;
    /// Place of `time_stats` in `COLUMNS`.
    pub const TIME_STATS: usize = 26;
}

/// `BatchEmbeddingOutput`.
pub mod batch_embedding {
    use super::{Carry, Column, ColumnKind, column};

    /// First element of the body.
    pub const TAG: &str = "BatchEmbeddingOutput";

    /// In the order of the body.
    pub const COLUMNS: &[Column] = &[
        column("rids", ColumnKind::List, Carry::Own),
        column("http_worker_ipcs", ColumnKind::List, Carry::Newest),
        column("finished_reasons", ColumnKind::List, Carry::Own),
        column("prompt_tokens", ColumnKind::List, Carry::Newest),
        column("completion_tokens", ColumnKind::List, Carry::Own),
        column("cached_tokens", ColumnKind::List, Carry::Newest),
        column("retraction_counts", ColumnKind::List, Carry::Newest),
        column("dp_ranks", ColumnKind::List, Carry::Newest),
        column("embeddings", ColumnKind::ListOrStacked, Carry::Newest),
        column("pooled_hidden_states", ColumnKind::Stacked, Carry::Newest),
        column("customized_info", ColumnKind::DictOfLists, Carry::Newest),
        column("time_stats", ColumnKind::DictOfLists, Carry::Newest),
    ];
    /// Place of `rids` in `COLUMNS`.
    pub const RIDS: usize = 0;
    /// Place of `http_worker_ipcs` in `COLUMNS`.
    pub const HTTP_WORKER_IPCS: usize = 1;
    /// Place of `finished_reasons` in `COLUMNS`.
    pub const FINISHED_REASONS: usize = 2;
    /// Place of `prompt_tokens` in `COLUMNS`.
    pub const PROMPT_TOKENS: usize = 3;
    /// Place of `completion_tokens` in `COLUMNS`.
    pub const COMPLETION_TOKENS: usize = 4;
    /// Place of `cached_tokens` in `COLUMNS`.
    pub const CACHED_TOKENS: usize = 5;
    /// Place of `retraction_counts` in `COLUMNS`.
    pub const RETRACTION_COUNTS: usize = 6;
    /// Place of `dp_ranks` in `COLUMNS`.
    pub const DP_RANKS: usize = 7;
    /// Place of `embeddings` in `COLUMNS`.
    pub const EMBEDDINGS: usize = 8;
    /// Place of `pooled_hidden_states` in `COLUMNS`.
    pub const POOLED_HIDDEN_STATES: usize = 9;
    /// Place of `customized_info` in `COLUMNS`.
    pub const CUSTOMIZED_INFO: usize = 10;
    /// Place of `time_stats` in `COLUMNS`.
    pub const TIME_STATS: usize = 11;
}
