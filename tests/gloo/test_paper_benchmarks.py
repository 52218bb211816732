"""Benchmarks in the shape of the paper's tables: numerics (Table 8) and ablation (Table 4)."""

import json

import pytest
from typer.testing import CliRunner

from charm_megatron.bench.ablation import RATIOS, compare, paper_networks, race
from charm_megatron.bench.case import OperatorRow
from charm_megatron.bench.cluster import Cluster
from charm_megatron.bench.numerics import UNSHARDED, NumericsCase, ScheduleVariant, measure_numerics
from charm_megatron.cli.main import app
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.workload import CAUSAL, NO_MASK, Workload

pytestmark = pytest.mark.gloo

NARROW, WIDE = ScheduleVariant("charm", "model", "model"), ScheduleVariant("charm", "float32", "float32")


def measure(dtype, mask=NO_MASK, layout="contiguous", draws=3):
    workload = Workload(1, 64, 2, 2, 16, 16, dtype, mask)
    case = NumericsCase(workload, (NARROW, WIDE), draws, layout)
    return {(row.implementation, row.tensor): row for row in measure_numerics(case, Cluster(2, 2))}


def test_wide_returns_are_nearer_to_unsharded_attention_than_narrow_ones():
    rows = measure("bfloat16")
    for tensor in ("out", "dq"):
        narrow, wide = (rows[str(variant), tensor].to_float64 for variant in (NARROW, WIDE))
        assert wide[1] < narrow[1], tensor
        assert 0 < wide[1] < wide[0] < 0.1


@pytest.mark.parametrize(("mask", "layout"), [(NO_MASK, "contiguous"), (CAUSAL, "zigzag")])
def test_in_float32_all_differences_are_roundings(mask, layout):
    rows = measure("float32", mask, layout, draws=1)
    assert {name for name, _ in rows} == {UNSHARDED, str(NARROW), str(WIDE)}
    for (name, _), row in rows.items():
        assert row.to_float64[0] < 2e-5, row
        assert (row.to_flash is None) == (name == UNSHARDED)


def test_the_command_shows_differences_beside_the_papers(tmp_path):
    path = tmp_path / "rows.json"
    sizes = ("--draws", "1", "--nodes", "1", "--ranks-per-node", "2", "--tokens", "16", "--head-dim", "8")
    result = CliRunner().invoke(app, ["bench", "numerics", *sizes, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "paper: charm" in result.output
    assert "8.34e-04" in result.output
    rows = json.loads(path.read_text("utf-8"))
    assert {row["tensor"] for row in rows} == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mask", "window:3,3"), "is neither causal nor none"),
        (("--schedules", "chram"), "did you mean 'charm'"),
        (("--tokens", "1001"), "1001"),
    ],
)
def test_numbers_that_do_not_fit_are_one_line(arguments, message):
    result = CliRunner().invoke(app, ["bench", "numerics", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_five_networks_are_those_of_the_paper_and_differ_from_a_profile_in_one_thing_each():
    made = paper_networks()
    assert [(s.num_gpus, s.gpu, s.crosses) for s in made] == [
        (4, "L20", False),
        (8, "L20", True),
        (4, "H20", False),
        (8, "H20", False),
        (16, "H20", True),
    ]
    assert all(len(network.paper) == len(RATIOS) for network in made)
    assert [s.profile.num_ranks for s in made] == [4, 8, 4, 8, 8]
    for network in made:
        network.profile.model_validate(network.profile.model_dump())
        assert (
            "charm_keep_kv" in race(network, tokens_per_rank=8, repetitions=1).case.schedules
            or not network.crosses
        )


def test_measured_ratios_stand_beside_those_of_the_same_row_of_the_paper():
    network = paper_networks()[1]
    rows = [
        OperatorRow(name, direction, "x", True, ratio_to_first=factor * ccr, ccr=ccr)
        for ccr in RATIOS
        for name, factor in (("ring", 1), ("rm_plus", 2), ("charm_keep_kv", 3))
        for direction in DIRECTIONS
    ]
    compared = compare(network, rows)
    assert [(row.seq_len, row.schedule, row.forward) for row in compared] == [
        (1792, "rm_plus", 0.5),
        (1792, "charm_keep_kv", 0.75),
        (7168, "rm_plus", 2.0),
        (7168, "charm_keep_kv", 3.0),
    ]
    assert compared[1].paper == pytest.approx(17.61 / 14.81)
