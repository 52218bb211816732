"""Every configuration that ships passes Megatron's own parser and checks, and its schedule is right."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.args import by_flag, check_config
from charm_megatron.cli.main import app
from charm_megatron.compile import compile_attention
from charm_megatron.config import load_run_config, variant_names
from charm_megatron.errors import InvalidInput
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.verify.tables import check_tables
from charm_megatron.workload import Workload

pytestmark = pytest.mark.megatron

FOLDER = Path(__file__).parents[2] / "configs" / "run"
RANKS_PER_NODE = 8
STARTERS = ("LOCAL_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")

# (file, variant): one attention call as (batch, sequence, query heads, KV heads, width), CP size.
CALLS = {
    **{
        ("gpt_350m.yaml", f"table_{table}_{batch}x{seq_len}"): ((batch, seq_len, 16, 16, 64), 16)
        for table, batch, seq_len in (
            *((6, 16, 2048), (6, 8, 4096), (6, 4, 8192), (6, 2, 16384)),
            *((7, 16, 16384), (7, 32, 8192), (7, 64, 4096), (7, 128, 2048)),
        )
    },
    **{
        ("gpt_1_3b.yaml", f"table_6_{batch}x{seq_len}"): ((batch, seq_len, 16, 16, 128), 16)
        for batch, seq_len in ((16, 2048), (8, 4096), (4, 8192), (2, 16384))
    },
    ("gpt_8b_long.yaml", "32k"): ((1, 32768, 32, 8, 128), 16),
    ("gpt_8b_long.yaml", "128k"): ((1, 131072, 32, 8, 128), 16),
    ("gpt_tiny_cpu.yaml", None): ((4, 512, 4, 2, 32), 4),
}


def test_every_file_and_variant_is_in_the_list() -> None:
    found = [(path.name, name) for path in FOLDER.iterdir() for name in variant_names(path) or (None,)]
    assert set(found) == set(CALLS)


@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_flags_pass_megatrons_checks_and_the_schedule_is_right(name: str, variant: str | None) -> None:
    sizes, cp_size = CALLS[name, variant]
    chosen = [f"variant={variant}"] if variant else []
    for schedule in ("ring", "charm"):
        config = load_run_config(FOLDER / name, [*chosen, f"charm.schedule={schedule}"])
        facts = check_config(config, Path("runs/run"), cpu=name == "gpt_tiny_cpu.yaml")
        dtype = "float32" if name == "gpt_tiny_cpu.yaml" else "bfloat16"
        batch, seq_len, heads, kv_heads, width = sizes
        assert facts.workload == Workload(batch, seq_len, heads, kv_heads, width, width, dtype)
        assert (facts.cp_size, config.launch.ranks) == (cp_size, cp_size)
        domains = even_domains(cp_size, max(2, cp_size // RANKS_PER_NODE))
        for phase in compile_attention(config.charm, domains, facts.workload, "zigzag").schedules:
            assert phase.name.startswith(schedule)
            check_tables(phase)
            check_schedule(phase)


def test_args_prints_what_a_shell_reads_back() -> None:
    arguments = ["args", str(FOLDER / "gpt_350m.yaml"), "--set", "variant=table_7_128x2048", "--out", "a b"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--cp-comm-type", nargs="+")
    parser.add_argument("--save")
    parser.add_argument("--distributed-backend")
    args, _ = parser.parse_known_args(shlex.split(result.stdout))
    assert (args.micro_batch_size, args.cp_comm_type, args.distributed_backend) == (128, ["charm"], None)
    assert args.save == str(Path("a b").absolute() / "checkpoints")
    assert len(result.stdout.splitlines()) == len(list(by_flag(shlex.split(result.stdout))))


def test_args_for_a_cpu_adds_what_it_needs() -> None:
    result = CliRunner().invoke(app, ["args", str(FOLDER / "gpt_tiny_cpu.yaml"), "--cpu"])
    assert "--distributed-backend=gloo\n" in result.stdout


def test_args_refuses_what_megatron_refuses() -> None:
    arguments = ["args", str(FOLDER / "gpt_350m.yaml"), "--set", "megatron.num_attention_heads=5"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: Megatron refuses these flags")


def test_memory_shows_the_ring_and_the_schedule_that_is_set_beside_the_papers_numbers() -> None:
    arguments = ["memory", str(FOLDER / "gpt_350m.yaml"), "--set", "variant=table_6_2x16384"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "16 in 2 domains: batch 2, 16384 tokens" in result.stdout
    rows = memory_rows(result.stdout, 2)
    assert rows["MiB"] == ["ring", "charm"]
    assert rows["paper, equations 11 and 12"] == ["160", "192"]
    for direction in ("forward", "backward"):
        parts = [rows[f"{direction}: {part}"] for part in ("foreign buffers", "own tensors", "total")]
        for buffers, own, total in zip(*parts, strict=True):
            assert float(total) == pytest.approx(float(buffers) + float(own), abs=1)
    result = CliRunner().invoke(app, [*arguments, "--set", "charm.schedule=double_ring"])
    assert memory_rows(result.stdout, 2)["MiB"] == ["ring", "double_ring"]


def memory_rows(text: str, num_schedules: int) -> dict[str, list[str]]:
    """The cells of each row of the first table, by label."""
    return {line.split("  ")[0]: line.split()[-num_schedules:] for line in text.splitlines()}


def test_memory_compares_any_schedules_and_refuses_unknown_ones_in_a_sentence() -> None:
    arguments = ["memory", str(FOLDER / "gpt_350m.yaml"), "--set", "variant=table_6_2x16384", "--schedules"]
    result = CliRunner().invoke(app, [*arguments, "charm,charm_keep_kv,double_ring,charm"])
    rows = memory_rows(result.stdout, 3)
    assert rows["MiB"] == ["charm", "charm_keep_kv", "double_ring"]
    bounded, kept, _ = map(float, rows["backward: foreign buffers"])
    assert kept > 1.5 * bounded
    for names, error in {
        "ring,chram": "unknown schedule 'chram'; did you mean 'charm'?",
        " , ": "--schedules ' , ' names no schedule; give some, such as ring,charm",
        "tasp,dist_flash": "dist_flash balances a mask that looks only back over contiguous shards",
    }.items():
        result = CliRunner().invoke(app, [*arguments, names])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {error}")
        assert result.stderr.count("\n") == 1


def test_memory_says_whether_charm_keeps_kv() -> None:
    arguments = ["memory", str(FOLDER / "gpt_350m.yaml"), "--set", "variant=table_6_2x16384"]
    result = CliRunner().invoke(app, [*arguments, "--set", "charm.keep_kv_mib=900"])
    assert "charm: as set; KV is kept, in" in result.stdout
    assert any("45079 45423 +344 2,048" in " ".join(line.split()) for line in result.stdout.splitlines())


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what SLURM tells the script of a job with so many nodes."""
    for variable in STARTERS:
        monkeypatch.delenv(variable, raising=False)

    def set_nodes(num_nodes: int) -> None:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(num_nodes))
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", f"1(x{num_nodes})")

    return set_nodes


def test_memory_is_that_of_the_nodes_of_an_allocation(allocation: Callable[[int], None]) -> None:
    allocation(4)
    arguments = ["memory", str(FOLDER / "gpt_350m.yaml"), "--set", "variant=table_6_2x16384"]
    result = CliRunner().invoke(app, arguments)
    assert "16 in 4 domains: batch 2" in result.stdout, result.stderr
    result = CliRunner().invoke(app, [*arguments, "--ranks-per-node", "2"])
    assert "16 in 8 domains: batch 2" in result.stdout, result.stderr


def test_a_written_schedule_is_checked_for_the_nodes_of_an_allocation(
    allocation: Callable[[int], None], tmp_path: Path
) -> None:
    options = ["--schedule", "charm", "--nodes", "2", "--ranks-per-node", "8", "--tokens-per-rank", "1024"]
    written = tmp_path / "mine.json"
    written.write_text(CliRunner().invoke(app, ["plan", *options, "--json"]).stdout)
    config = load_run_config(
        FOLDER / "gpt_350m.yaml", ["variant=table_6_2x16384", f"charm.schedule={written}"]
    )
    facts = check_config(config, Path("runs/run"), cpu=False)
    assert facts.domains is None, "hosts are not known here, so the file may be right"
    allocation(2)
    assert check_config(config, Path("runs/run"), cpu=False).domains == even_domains(16, 2)
    allocation(4)
    with pytest.raises(
        InvalidInput, match=r"is for 16 ranks in domains .*, but this group has 16 ranks in domains"
    ):
        check_config(config, Path("runs/run"), cpu=False)
