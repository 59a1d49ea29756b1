"""Steps with fixed sizes and tokens that stay on the device make what plain steps make, on a CPU that plays again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from servekit.engine import decode_graphs
from servekit.engine.decode_graphs import DecodeGraphs
from servekit.engine.kv_cache import KvPool
from servekit.engine.linear import DenseLinear
from servekit.engine.torch_runner import TorchRunner
from servekit.models.decoder import Decoder
from servekit.models.grouped_experts import GroupedExperts, group
from servekit.models.layers import GatedFeedForward, MixtureOfExperts
from servekit.models.registry import load_model, read_config
from servekit.scheduler.rank import TorchRank

from tests.unit.scheduler_world import config
from tests.unit.test_overlap import Link, request
from tests.unit.tiny_models import VOCABULARY, save_case

CPU = torch.device("cpu")
PAGES, PAGE = 40, 4


def again(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """As a recording: the result is always in the same place, and playing reads the inputs of that moment."""
    result = work().fill_(torch.nan)

    def play() -> None:
        result.copy_(work())

    return play, result


def load(folder: Path, case: str) -> Decoder:
    path = save_case(folder / case, case)
    return load_model(path, read_config(path), DenseLinear, torch.float32, CPU, lambda done, total: None)


class Counting(DecodeGraphs):
    """Counts the steps that were played."""

    played = 0

    def states(self, *args: object) -> torch.Tensor:
        self.played += 1
        return super().states(*args)  # type: ignore[arg-type]


def serve(model: Decoder, ahead: int, recorded: bool) -> tuple[Link, Counting | None]:
    c = model.config
    pool = KvPool(c.layers, c.kv_heads, c.head_size, PAGES + 1, PAGE, torch.float32, CPU)
    graphs = Counting(model.states, pool, c.windows, again) if recorded else None
    runner = TorchRunner(model, pool, torch.float32, CPU, {}, graphs)
    runner.ahead = ahead
    deliveries = [
        [request(1, list(range(1, 20)), temperature=0.0, max_new_tokens=20)],
        [request(2, [7, 8, 9], temperature=0.8), request(3, [5] * 9, max_new_tokens=30, temperature=0.0)],
        [request(4, list(range(1, 20)), {"return_logprob": True, "logprob_start_len": 0}, temperature=0.0)],
        [],
        [request(5, [30], temperature=1.0, top_p=0.7), request(6, [31], repetition_penalty=1.5)],
    ]
    link = Link(deliveries)
    sizes = {"vocab_size": VOCABULARY, "pages": PAGES, "page": PAGE, "max_model_len": 64}
    TorchRank(runner, config(**sizes), rank=0, epoch=1).run(link, link.stop.is_set)  # type: ignore[arg-type]
    assert len(link.ends) == 6
    return link, graphs


@pytest.mark.parametrize("case", ["llama", "mistral", "llama-dynamic", "qwen3-moe"])
def test_tokens_are_those_of_plain_steps(tmp_path: Path, case: str) -> None:
    model = load(tmp_path, case)
    plain, _ = serve(model, 0, recorded=False)
    for ahead, recorded in ((1, False), (0, True), (1, True)):
        link, graphs = serve(model, ahead, recorded)
        assert link.ends == plain.ends
        for rid, told in plain.told.items():
            assert link.told[rid]["decode_ids"] == told["decode_ids"], (rid, ahead, recorded)
        if graphs is not None:
            assert graphs.played > 20
            # 1 to 8 rows, and few enough pages for one width.
            assert set(graphs._recorded) <= {(rows, 16) for rows in (1, 2, 4, 8)}
            assert not graphs._pool.layers[0][0].any(), "the padding page was written to"


def test_what_is_large_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, "llama")
    c = model.config
    layer_page = 4 * PAGE * 2 * c.kv_heads * c.head_size
    monkeypatch.setattr(decode_graphs, "_MAX_BYTES", 32 * layer_page)
    _, graphs = serve(model, 0, recorded=True)
    assert graphs is not None
    assert set(graphs._recorded) == {(1, 16), (2, 16)}


def test_experts_in_groups_are_experts_one_by_one(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3-moe")
    mixture = next(module for module in model.modules() if isinstance(module, MixtureOfExperts))
    assert mixture.grouped is None
    assert not model.recordable
    assert load(tmp_path, "llama").recordable
    experts = [expert for expert in mixture.experts if isinstance(expert, GatedFeedForward)]
    assert group([(expert.gate_up, expert.down) for expert in experts]) is None, "a CPU waits for nobody"
    for tokens in (1, 2, 17):
        x = torch.randn(tokens, model.config.hidden)
        with torch.inference_mode():
            expected = mixture(x)
            mixture.grouped = GroupedExperts(
                torch.stack([expert.gate_up.weight for expert in experts]),
                torch.stack([expert.down.weight for expert in experts]),
            )
            found = mixture(x)
            mixture.grouped = None
        assert torch.allclose(found, expected, atol=1e-5)
