"""`--show-ranks`: the layout of a command line, without starting anything."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from servekit.cli import serve


def shown(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        serve.main(arguments)
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    return said.out


def test_json_is_a_list_of_all_ranks(capsys):
    ranks = json.loads(shown(capsys, "--tp", "2", "--pp-size", "2", "-dp", "2", "--nnodes", "2", "--show-ranks=json"))
    assert len(ranks) == 8
    assert ranks[5] == {
        "node": 1, "device": 1, "replica": 1, "pp": 0, "tp": 1, "attn_dp": 0, "attn_cp": 0, "attn_tp": 1,
        "moe_dp": 0, "moe_ep": 0, "moe_tp": 1, "leader": False,
    }  # fmt: skip
    assert [rank["leader"] for rank in ranks] == [True, False, False, False] * 2


def test_the_table_names_leaders_and_the_members_of_groups(capsys):
    said = shown(capsys, "--show-ranks", "model.gguf", "--tp", "4", "--attn-dp-size", "2", "--ep", "2", "--pp", "2")
    lines = said.splitlines()
    assert lines[0].split()[:4] == ["rank", "node", "device", "replica"]
    assert [line.split()[0] for line in lines[1:9] if "dp " in line] == ["0", "2"]
    groups = dict(line.split(None, 1) for line in lines[11:])
    assert groups["tp"] == "0 1 2 3 | 4 5 6 7"
    assert groups["pp"] == "0 4 | 1 5 | 2 6 | 3 7"
    assert groups["attn_tp"] == "0 1 | 2 3 | 4 5 | 6 7"
    assert groups["attn_dp"] == "0 2 | 1 3 | 4 6 | 5 7"
    assert groups["moe_ep"] == "0 2 | 1 3 | 4 6 | 5 7"


def test_neighbours_spellings_of_several_flags(capsys):
    args = serve.parse(["--tp", "4", "--attn-dp-size", "2", "--enable-expert-parallel"])
    assert (args.data_parallel_size, args.enable_dp_attention, args.expert_parallel_size) == (2, True, 4)
    assert serve.parse(["--tp", "4", "--moe-dp-size", "2", "--enable-expert-parallel"]).expert_parallel_size == 2
    with pytest.raises(SystemExit) as end:
        serve.main(["--tp", "4", "--attn-dp-size", "2", "--dp", "4"])
    assert end.value.code == 2 and "must be the same" in capsys.readouterr().err


def test_impossible_sizes_are_a_mistake_of_usage_in_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        serve.main(["--tp", "4", "--ep", "3", "--show-ranks"])
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err == (
        "servekit-serve: error: --tensor-parallel-size 4 must be a multiple of --expert-parallel-size 3 x"
        " --moe-data-parallel-size 1: for 4 their product can be 1, 2 or 4\n"
    )


def test_neither_torch_nor_a_model_is_needed():
    code = (
        "import sys; from servekit.cli import serve\n"
        "try: serve.main(['no-such-model', '--tp', '8', '--show-ranks=json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'servekit._core'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 8


def test_headless_is_what_every_node_but_the_first_is(capsys):
    layout = ["--nnodes", "2", "--dp", "2", "--dist-init-addr", "10.0.0.1:5000", "--headless"]
    assert serve.parse([*layout, "--node-rank", "1"]).node_rank == 1
    with pytest.raises(SystemExit):
        serve.main(layout)
    assert "--headless needs a --node-rank above 0" in capsys.readouterr().err
