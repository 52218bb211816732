"""What Megatron's flags cannot do is one sentence, before anything is made."""

import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.config import load_run_config, parse_run_config
from charm_megatron.topology.nvidia_smi import least_capability
from charm_megatron.train.gpu_environment import set_cuda_connections
from charm_megatron.train.run_folder import RunFolder
from tests.checkpoints import save_checkpoint
from tests.megatron.small_run import BASE

pytestmark = pytest.mark.megatron

CASES = {
    "megatron.seq_length=250": "must be a multiple of 2 * 4 = 8, such as 248",
    "charm.domains=3": "4 context-parallel ranks do not split into 3 equal domains; domains may be 1 or 2 or 4",
    "launch.ranks=6": "launch.ranks 6 must be a multiple of 4",
    "megatron.num_layer=2": "megatron.num_layer is not a flag of Megatron; did you mean 'num_layers'?",
    "megatron.num_layers=two": "--num-layers: invalid int value: 'two'",
    "megatron.num_layers=true": "megatron.num_layers needs a value",
    "megatron.num_layers=": "megatron.num_layers is missing",
    "megatron.lr=[1, 2]": "megatron.lr takes one value",
    "megatron.swiglu=3": "megatron.swiglu is a switch: true or false, but is 3",
    "megatron.normalization=Batch": "invalid choice: 'Batch'",
    "megatron.transformer_impl=transformer_engine": "must be 'local' without CUDA",
    "megatron.cp_comm_type=p2p": "needs Transformer Engine",
    "megatron.attention_dropout=0.1": "does not support attention_dropout 0.1; set it to 0",
    "megatron.save=/somewhere": "megatron.save must be left out",
    "megatron.num_attention_heads=5": "args.hidden_size % args.num_attention_heads == 0 does not hold",
    "megatron.global_batch_size=0": "Megatron refuses these flags",
    "megatron.train_iters=-5": "megatron.train_iters must be at least 1, but is -5",
    "megatron.train_iters=0": "megatron.train_iters must be at least 1, but is 0",
    "megatron.train_iters=10000000000000000000000": "megatron.train_iters must be at most 1,000,000,000",
    "megatron.eval_interval=0": "megatron.eval_interval must be at least 1",
    "megatron.split=a,b,c": "such as 90,5,5, but is 'a,b,c'",
    "megatron.split=0,1,1": "such as 90,5,5, but is '0,1,1'",
    "megatron.attention_backend=flash2": "invalid choice: 'flash2' (choose from flash, fused, unfused, local, auto)",
    "megatron.attention_backend=local": "takes the place of the attention itself; leave it out",
    "megatron.experimental_attention_variant=gated_delta_net": "needs Transformer Engine",
    "megatron.use_megatron_fsdp=true": "megatron.use_megatron_fsdp needs CUDA; leave it out",
    "megatron.sequence_parallel=true": "megatron.sequence_parallel needs CUDA; leave it out",
    "charm.kernel=fast": "unknown kernel 'fast'",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    megatron = {**BASE, "context_parallel_size": 4}
    path.write_text(yaml.safe_dump({"launch": {"ranks": 4}, "megatron": megatron}))
    return path


@pytest.mark.parametrize("setting", CASES)
def test_flags_that_do_not_fit_are_one_sentence(config: Path, setting: str) -> None:
    out = config.parent / "made" / "run"
    result = CliRunner().invoke(app, ["pretrain", str(config), "--out", str(out), "--set", setting])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert CASES[setting] in result.stderr
    assert not out.parent.exists()


def test_a_mapping_that_megatron_cannot_make_is_said_ahead(config: Path) -> None:
    settings = ("use_tp_pp_dp_mapping=true", "pipeline_model_parallel_size=2", "context_parallel_size=2")
    words = [word for setting in settings for word in ("--set", f"megatron.{setting}")]
    result = CliRunner().invoke(app, ["pretrain", str(config), "--out", str(config.parent / "run"), *words])
    assert result.exit_code == 2
    assert (
        "use_tp_pp_dp_mapping with 2 pipeline stages needs tensor x context parallel size, 2,"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("flags", "capability", "wanted"),
    [
        ({"context_parallel_size": 2}, 9.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"tensor-model-parallel-size": 2}, None, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"context_parallel_size": 2}, 10.0, {}),
        ({"context_parallel_size": 2, "use-megatron-fsdp": True}, 9.0, {}),
        ({}, 9.0, {}),
    ],
)
def test_a_device_has_one_queue_only_where_megatron_demands_it(
    flags: dict[str, object], capability: float | None, wanted: dict[str, str]
) -> None:
    environment: dict[str, str] = {}
    set_cuda_connections(parse_run_config({"megatron": flags}, "test"), environment, lambda: capability)
    assert environment == wanted


def test_the_least_compute_capability_counts() -> None:
    assert least_capability("9.0\n8.6\n") == 8.6
    assert least_capability("NVIDIA-SMI has failed") is None


def test_text_too_short_for_a_sequence_leaves_no_folder(config: Path) -> None:
    text = config.parent / "text"
    text.mkdir()
    (text / "short.txt").write_text("only a few words")
    out = config.parent / "made" / "run"
    arguments = ["pretrain", str(config), "--out", str(out), "--set", f"data.text={text}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the training part of the text has 17 tokens")
    assert not out.parent.exists()


def test_a_run_that_is_done_is_not_resumed(config: Path) -> None:
    checkpoints = config.parent / "run" / "checkpoints"
    save_checkpoint(checkpoints, 20)
    arguments = ["pretrain", str(config), "--out", str(checkpoints.parent), "--resume"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "is already at iteration 20" in result.stderr


def test_another_model_is_not_loaded_from_a_checkpoint(config: Path) -> None:
    out = config.parent / "run"
    RunFolder(out).create(load_run_config(config))
    save_checkpoint(out / "checkpoints", 4)
    arguments = ["pretrain", str(config), "--out", str(out), "--resume"]
    for setting, sentence in (
        ("num_layers=4", "megatron.num_layers is 4, but "),
        ("num_attention_heads=8", "megatron.num_attention_heads is 8, but "),
        ("swiglu=true", "megatron.ffn_hidden_size is "),
    ):
        result = CliRunner().invoke(app, [*arguments, "--set", f"megatron.{setting}"])
        assert result.exit_code == 2
        assert sentence in result.stderr
        assert "set it back, or start a new run" in result.stderr
    assert load_run_config(out / "config.yaml") == load_run_config(config)


def test_a_torn_checkpoint_is_refused_before_megatron_is_imported(config: Path) -> None:
    out = config.parent / "run"
    RunFolder(out).create(load_run_config(config))
    for iteration in (4, 6):
        save_checkpoint(out / "checkpoints", iteration)
    (out / "checkpoints" / "iter_0000006" / "__0_0.distcp").unlink()
    start_s = time.monotonic()
    result = CliRunner().invoke(app, ["pretrain", str(config), "--out", str(out), "--resume"])
    assert time.monotonic() - start_s < 2.0
    assert result.exit_code == 2
    assert "__0_0.distcp is missing; iteration 4 is whole: `echo 4 > " in result.stderr


def test_a_folder_that_others_may_write_to_is_resumed_only_when_told(config: Path) -> None:
    out = config.parent / "run"
    RunFolder(out).create(load_run_config(config))
    save_checkpoint(out / "checkpoints", 20).chmod(0o777)
    arguments = ["pretrain", str(config), "--out", str(out), "--resume"]
    refused = CliRunner().invoke(app, arguments)
    assert "iter_0000020 can be written by everybody" in refused.stderr
    assert "is already at iteration 20" in CliRunner().invoke(app, [*arguments, "--trust-folder"]).stderr


MEMORY = {
    ("--ranks-per-node", "3"): (
        "--ranks-per-node 3: 4 context-parallel ranks do not fill nodes of so many; a divisor of 4 would work"
    ),
    ("--set", "charm.domains=racks.yaml"): (
        "racks.yaml is not one key, domains, with a list of lists of hosts, such as "
        "domains: [[node1, node2], [node3:0], [node3:1]]"
    ),
    ("--set", "charm.domains=nobody.yaml"): "nobody.yaml: domain 2 of 2 lists no host; leave it out",
    ("--set", "charm.domains=twice.yaml"): (
        "twice.yaml lists a 2 times; name each host, or each HOST:NUMA, once"
    ),
}
DOMAIN_FILES = {
    "racks.yaml": "hosts: [[a], [b]]",
    "nobody.yaml": "domains: [[a], []]",
    "twice.yaml": "domains: [[a, b], [c, a]]",
}


@pytest.mark.parametrize("words", MEMORY, ids=lambda words: words[-1])
def test_domains_that_cannot_be_are_refused_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    for name, text in DOMAIN_FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["memory", "gpt_tiny_cpu", "--cpu", *words])
    assert (result.exit_code, result.stderr) == (2, f"error: {MEMORY[words]}\n")


def test_files_that_are_not_text_are_named_before_training(config: Path) -> None:
    text = config.parent / "text"
    text.mkdir()
    (text / "short.txt").write_text("only a few words")
    (text / "archive.zip").write_bytes(b"\xff\xfe")
    arguments = ["pretrain", str(config), "--out", str(config.parent / "run"), "--set", f"data.text={text}"]
    result = CliRunner().invoke(app, arguments)
    sentence = f"of 2 files in data.text {text} 1 is not in UTF-8 and left out: archive.zip"
    assert sentence in result.stdout.replace("\n", "")
    assert result.exit_code == 2
