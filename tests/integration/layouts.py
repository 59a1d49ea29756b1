"""The layouts that groups of ranks are tried in, over tiny checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models

from tests.unit.llama_reference import save_folder
from tests.unit.tiny_models import CASES, VOCABULARY, tensors


@dataclass(frozen=True)
class Layout:
    """Flags, the kind of model, and who is who.

    Attributes:
        victims: titles of a leader and of another rank, both of one replica; without followers, of two leaders.
        replicas: how many there are.
    """

    flags: str
    victims: tuple[str, str]
    replicas: int = 1
    case: str = "qwen3"

    @property
    def arguments(self) -> list[str]:
        """The flags as a command line."""
        return self.flags.split()


def rank(dp: int, pp: int, tp: int) -> str:
    """Title of a rank of a group."""
    return f"servekit::scheduler[dp={dp},pp={pp},tp={tp}]"


LAYOUTS = {
    "tp2": Layout("--tp 2", (rank(0, 0, 0), rank(0, 0, 1))),
    "pp2": Layout("--pp 2", (rank(0, 0, 0), rank(0, 1, 0))),
    "replicas2-pp2": Layout("--dp 2 --pp 2", (rank(1, 0, 0), rank(1, 1, 0)), replicas=2),
    "tp2-pp2": Layout("--tp 2 --pp 2", (rank(0, 0, 0), rank(0, 1, 1))),
    "dp-attention2-in-tp2": Layout("--tp 2 --dp 2 --enable-dp-attention", (rank(0, 0, 0), rank(1, 0, 1))),
    "dp-attention2-in-tp4": Layout("--tp 4 --dp 2 --enable-dp-attention", (rank(1, 0, 2), rank(0, 0, 1))),
    "ep2": Layout("--tp 2 --ep 2", (rank(0, 0, 0), rank(0, 0, 1)), case="qwen3-moe"),
    "moe-dp2": Layout("--tp 2 --moe-dp-size 2", (rank(0, 0, 0), rank(0, 0, 1)), case="qwen3-moe"),
    "attn-cp2": Layout("--tp 2 --attn-cp-size 2", (rank(0, 0, 0), rank(0, 0, 1))),
}


def save_tiny(folder: Path, case: str, context: int = 64) -> Path:
    """A tiny checkpoint with a tokenizer whose words are t0, t1 and so on."""
    config = CASES[case] | {"max_position_embeddings": context}
    save_folder(folder, config, tensors(config))
    words = {f"t{i}": i for i in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder
