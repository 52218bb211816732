"""The command line: one sentence and exit code 2 for what the caller can mend, and a quick start."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from charm_megatron import __version__
from charm_megatron.cli.main import app

pytestmark = pytest.mark.pure


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("launch: {ranks: 2}\nmegatron: {num_layers: 2}\n")
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_refused(result: Result, sentence: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert result.stdout == ""


def test_version_is_printed() -> None:
    assert invoke("--version").stdout == f"charm-megatron {__version__}\n"


def test_help_names_the_commands() -> None:
    assert "pretrain" in invoke("--help").stdout


def test_help_does_not_import_torch() -> None:
    program = "import sys, charm_megatron.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_launcher_does_not_import_torch_or_megatron() -> None:
    program = (
        "import sys, charm_megatron.train.pretrain, charm_megatron.train.progress; "
        "sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("megatorn.x=1", "unknown key 'megatorn'; did you mean 'megatron'?"),
        ("charm.schedul=ring", "did you mean 'schedule'?"),
        ("charm.schedule=chram", "charm.schedule 'chram' is unknown; did you mean 'charm'?"),
        ("launch.ranks=none", "launch.ranks"),
        ("data.text=/no/such/folder", "data.text /no/such/folder is not a folder"),
        ("megatron.num_layers", "is not SECTION.KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_one_sentence(config: Path, setting: str, sentence: str) -> None:
    out = config.parent / "run"
    assert_refused(invoke("pretrain", config, "--out", out, "--set", setting), sentence)
    assert not out.exists()


def test_a_missing_configuration_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(invoke("pretrain", tmp_path / "none.yaml"), "cannot read configuration")


def test_resume_needs_a_folder_with_a_checkpoint(config: Path) -> None:
    assert_refused(invoke("pretrain", config, "--resume"), "--resume needs --out")
    sentence = "holds no checkpoint to continue"
    assert_refused(invoke("pretrain", config, "--resume", "--out", config.parent / "run"), sentence)


def test_a_folder_with_files_is_not_overwritten(config: Path) -> None:
    assert_refused(invoke("pretrain", config, "--out", config.parent), "is not empty")
    assert [path.name for path in config.parent.iterdir()] == ["run.yaml"]


def test_a_rank_of_another_launcher_needs_a_folder(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_refused(invoke("pretrain", config), "--out must be given")
    sentence = "launch.ranks is 2, but 3 ranks were started"
    assert_refused(invoke("pretrain", config, "--out", config.parent / "run"), sentence)
