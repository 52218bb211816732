"""A Megatron training script is launched unchanged, and trains as it does on one rank."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.processes.ports import free_port
from charm_megatron.train.flags import CPU_NEEDS

pytestmark = pytest.mark.megatron

SCRIPT = Path(__file__).parent / "pretrain_gpt.py"
FLAGS = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--max-position-embeddings", "128", "--position-embedding-type", "rope"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--micro-batch-size", "1"),
    *("--global-batch-size", "2", "--train-iters", "4", "--lr", "1e-3"),
    *("--lr-decay-style", "constant", "--eval-iters", "1", "--eval-interval", "4"),
    *("--log-interval", "1", "--mock-data", "--vocab-size", "511", "--split", "90,5,5"),
    "--no-create-attention-mask-in-dataloader",
]


def cpu_flags() -> list[str]:
    names = {f"--{name.replace('_', '-')}": value for name, value in CPU_NEEDS.items()}
    return [
        word for name, value in names.items() for word in ([name] if value is True else [name, str(value)])
    ]


def losses(num_ranks: int, launcher: list[str], flags: list[str]) -> tuple[list[float], str]:
    """Starts the ranks and gives the losses that Megatron prints, of the iterations and of the evaluations."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
        *("--master-addr=127.0.0.1", f"--master-port={free_port()}"),
        *(*launcher, *FLAGS, *cpu_flags(), "--context-parallel-size", str(num_ranks), *flags),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"lm loss(?: value)?: ([0-9.E+-]+)", done.stdout)
    return [float(text) for text in found], done.stdout


def test_a_launched_script_trains_as_on_one_rank(tmp_path: Path) -> None:
    config = tmp_path / "charm.yaml"
    config.write_text("domains: 2\n")
    launcher = ["-m", "charm_megatron.launch", "--charm-config", str(config)]
    alone, _ = losses(1, [*launcher, str(SCRIPT)], [])
    split, output = losses(2, [*launcher, str(SCRIPT)], ["--cp-comm-type", "charm"])
    assert len(alone) == 7  # 4 iterations, 3 evaluations
    assert split == pytest.approx(alone, rel=0.0, abs=1e-5)
    for line in (
        "charm-megatron: --cp-comm-type charm is installed; there is no Transformer Engine",
        "charm-megatron: context parallelism: 2 ranks in 2 domains [0 | 1]",
        "charm-megatron: schedule: charm",
        "charm-megatron: sent by a rank, backward",
    ):
        assert output.count(line) == 1, output


def test_a_spec_installs_the_attention_without_the_launcher() -> None:
    """Megatron's own --spec, under a script that imports nothing of ours for its attention."""
    flags = [
        "--cp-comm-type",
        "charm",
        "--spec",
        "charm_megatron.mcore.spec",
        "layer_spec",
        "--mtp-num-layers",
        "1",
    ]
    split, output = losses(2, [str(SCRIPT)], flags)
    assert len(split) == 7
    assert "charm-megatron: context parallelism: 2 ranks in one domain [0 1]" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.py"], "absent.py is not a file; give the training script to run"),
        (["--charm-config", "absent.yaml", str(SCRIPT)], "cannot read configuration absent.yaml"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["launch", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1


def test_unknown_settings_are_named(tmp_path: Path) -> None:
    config = tmp_path / "charm.yaml"
    config.write_text("shedule: ring\n")
    result = CliRunner().invoke(
        app, ["launch", "--charm-config", str(config), "--", str(SCRIPT), "--num-layers", "2"]
    )
    assert "unknown key 'shedule'; did you mean 'schedule'?" in result.stderr
