"""Settings are refused with one line that names the flag."""

from __future__ import annotations

import msgspec
import pytest
from servekit.config.server_args import ConfigError, ServerArgs


def test_defaults_are_valid_and_survive_the_wire():
    args = ServerArgs()
    args.validate()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(args), type=ServerArgs) == args


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("port", -1, "--port"),
        ("tokenizer_workers", 0, "--tokenizer-workers"),
        ("tokenizer_workers", 4096, "--tokenizer-workers"),
        ("detokenizer_workers", 64, "--detokenizer-workers"),
        ("data_parallel_size", 0, "--data-parallel-size"),
        ("load_balance_method", "best", "--load-balance-method"),
        ("max_model_len", 1, "--max-model-len"),
        ("max_total_tokens", 8, "--max-total-tokens"),
        ("drain_timeout", -1.0, "--drain-timeout"),
        ("mock_step_ms", float("nan"), "--mock-step-ms"),
        ("max_body_size", 0, "--max-body-size"),
        ("dtype", "int3", "--dtype"),
        ("device", "tpu", "--device"),
        ("model", "", "MODEL"),
        ("seed", -1, "--seed"),
    ],
)
def test_each_bad_value_is_named(field, value, flag):
    with pytest.raises(ConfigError, match=flag) as error:
        msgspec.structs.replace(ServerArgs(), **{field: value}).validate()
    assert "\n" not in str(error.value)
