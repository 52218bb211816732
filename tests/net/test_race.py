"""The operator benchmark on a network that is really shaped."""

import json

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.testbed import namespaces

REASON = namespaces.why_unavailable()
pytestmark = [pytest.mark.net, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

NUMBERS = ("median_s", "ccr", "bytes_planned", "bytes_wire", "bound_s", "busiest_s")


def test_the_smoke_suite_counts_on_the_wire_what_is_planned_and_leaves_no_network(tmp_path):
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "csv", "png")}
    before = set(namespaces.networks())
    arguments = ("--json", str(files["json"]), "--csv", str(files["csv"]), "--picture", str(files["png"]))
    result = CliRunner().invoke(app, ["bench", "operator", "--suite", "smoke", *arguments])
    assert result.exit_code == 0, result.output
    assert set(namespaces.networks()) <= before
    rows = json.loads(files["json"].read_text("utf-8"))
    ours = [row for row in rows if not row["peer"]]
    assert {(row["schedule"], row["pass"], row["compute"]) for row in ours} == {
        (name, direction, how)
        for name in ("ring", "charm")
        for direction in DIRECTIONS
        for how in ("modelled", "real")
    }
    for row in ours:
        assert all(row[name] > 0 for name in NUMBERS), row
        assert row["bytes_wire"] == pytest.approx(row["bytes_planned"], rel=0.03)
        if row["compute"] == "modelled":  # real blocks take less beside transfers than when a machine is busy
            assert row["bound_s"] <= 1.02 * row["median_s"], "faster than the links"
    assert {row["schedule"] for row in rows if row["peer"]} == {"torch_ring"}
    assert len(files["csv"].read_text("utf-8").splitlines()) == 1 + len(rows)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
