"""The command line: one sentence and exit code 2 for what the caller can mend, and a quick start."""

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.core
import typer.main
from typer.testing import CliRunner, Result

from charm_megatron import __version__
from charm_megatron.cli import version
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


def all_commands(group: typer.core.TyperGroup, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command, through all groups."""
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from all_commands(command, *words, name)
        else:
            yield (*words, name)


ROOT = typer.main.get_command(app)
assert isinstance(ROOT, typer.core.TyperGroup)
COMMANDS = sorted(all_commands(ROOT))

# What is wrong with each command's arguments, and the sentence that says so.
BAD_INPUT = {
    ("pretrain",): (("/no/such.yaml",), "cannot read configuration /no/such.yaml"),
    ("launch",): (("--charm-config", "/no/such.yaml", "x.py"), "cannot read configuration /no/such.yaml"),
    ("args",): (("/no/such.yaml",), "cannot read configuration /no/such.yaml"),
    ("memory",): (("x.yaml", "--ranks-per-node", "0"), "--ranks-per-node must be at least 1, but is 0"),
    ("plan",): (("--schedule", "chram"), "did you mean 'charm'?"),
    ("check",): (("/no/such.json",), "cannot read schedule /no/such.json"),
    ("doctor",): (("--ranks", "0"), "--ranks must be at least 1, but is 0"),
    ("compare",): (("/no/such", "/no/such"), "/no/such is no run folder"),
    ("bench", "operator"): (("--heads", "0"), "--heads must be at least 1, but is 0"),
    ("bench", "ablation"): (("--repetitions", "0"), "--repetitions must be at least 1, but is 0"),
    ("bench", "card"): (("--device", "gpu"), "--device 'gpu' is unknown"),
    ("bench", "host"): (("--models", "gpt_8b"), "did you mean 'gpt_8b_32k'"),
    ("bench", "numerics"): (("--draws", "0"), "--draws must be at least 1, but is 0"),
    ("bench", "planning"): (("--sizes", "16,many"), "'16,many' is not a list of numbers"),
    ("bench", "tables-6-7"): (("/no/such",), "/no/such is not a folder"),
    ("testbed", "up"): (("nvlink2x4",), "did you mean 'nvlink_2x4'"),
    ("testbed", "down"): (("nvlink2x4",), "did you mean 'nvlink_2x4'"),
    ("testbed", "exec"): (("nvlink_2x4", "--rank", "8", "--", "true"), "--rank must be 0 to 7"),
    ("testbed", "status"): (("nvlink2x4",), "did you mean 'nvlink_2x4'"),
    ("testbed", "probe"): (("nvlink2x4",), "did you mean 'nvlink_2x4'"),
}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_bad_input_to_every_command_is_one_sentence(words: tuple[str, ...]) -> None:
    arguments, sentence = BAD_INPUT[words]
    assert_refused(invoke(*words, *arguments), sentence)


def test_help_names_every_command_and_needs_nothing_heavy() -> None:
    """In one process of its own, in which nothing else has imported anything."""
    program = (
        "import json, sys; from typer.testing import CliRunner; from charm_megatron.cli.main import app; "
        "said = [CliRunner().invoke(app, [*words, '--help']) for words in json.loads(sys.argv[1])]; "
        "print(json.dumps([[result.exit_code, result.stdout] for result in said])); "
        "sys.exit(bool({'torch', 'numpy', 'matplotlib', 'yaml', 'megatron'} & set(sys.modules)))"
    )
    asked: list[tuple[str, ...]] = [(), ("bench",), ("testbed",), *COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words, (code, text) in zip(asked, json.loads(done.stdout), strict=True):
        assert code == 0, words
        assert " ".join(("charm-megatron", *words)) in text
        for *group, name in COMMANDS:
            assert tuple(group) != words or name in text


NAMES = [
    "charm-megatron",
    "Python",
    "torch",
    "CUDA",
    "NCCL",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
]


def test_version_prints_a_line_for_each_package_that_decides_how_this_runs() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    versions = dict(line.split(": ") for line in result.stdout.splitlines())
    assert [name for name in versions if name != "apex"] == NAMES
    assert versions["charm-megatron"] == __version__
    assert versions["Python"] == platform.python_version()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert all(versions.values())


def test_what_is_absent_is_said_and_nothing_of_megatron_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    before = set(sys.modules)
    monkeypatch.setattr(version, "version", absent)
    lines = list(version.version_lines())
    for name in NAMES[5:]:
        assert f"{name}: not installed" in lines
    assert not any(line.startswith("apex") for line in lines)
    roots = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not roots & {"megatron", "transformer_engine", "flash_attn", "apex"}


@pytest.mark.parametrize(
    ("is_nvidias", "line"), [(True, "apex: 7"), (False, "apex: 7 (PyPI's unrelated package)")]
)
def test_pypis_package_of_the_name_of_apex_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_nvidias: bool, line: str
) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    if is_nvidias:
        (package / "optimizers").mkdir()
        (package / "optimizers" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(version, "version", lambda name: "7")
    assert line in list(version.version_lines())


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
