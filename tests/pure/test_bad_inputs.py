"""What users get wrong, and what they are told: a table. Beside it nothing is said, and no file is left."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app

pytestmark = pytest.mark.pure

FILES: dict[str, str | bytes] = {
    "run.yaml": "launch: {ranks: 2}\nmegatron: {num_layers: 2}\n",
    "list.yaml": "- launch\n- charm\n",
    "tabs.yaml": "launch:\n\tranks: 2\n",
    "empty.yaml": "",
    "section.yaml": "launch: 2\n",
    "text.yaml": "data: {text: 5}\n",
    "words.yaml": "launch: {ranks: two}\n",
    "half.yaml": "launch: {ranks: 2.5}\n",
    "fuse.yaml": "charm: {fuse: perhaps}\n",
    "flight.yaml": "charm: {flight_folder: 3}\n",
    "nested.yaml": "launch: {ranks: {a: 2}}\n",
    "racks.yaml": "hosts: [[a], [b]]\n",
    "nobody.yaml": "domains: [[a], []]\n",
    "flat.yaml": "domains: [a, b]\n",
    "twice.yaml": "domains: [[a, b], [c, a]]\n",
    "profile.yaml": "name: a\n",
    "schedule.txt": "post 0.0 | send 1 kv0\n",
    "latin.json": b"\x80\x81",
    "number.json": "42",
    "other.json": '{"format": "something else"}',
    "no_format.json": '{"version": 2}',
    "bytes/archive.zip": b"\xff\xfe",
    "bytes/empty.txt": "",
    "nothing/here/.keep": "",
    "one/config.yaml": "launch: {ranks: 1}\n",
    "one/metrics.jsonl": "{}\n",
    "no_number/checkpoints/latest_checkpointed_iteration.txt": "ten\n",
    "no_folder/checkpoints/latest_checkpointed_iteration.txt": "10\n",
    "file/checkpoints": "",
}
"""What lies in the folder in which the commands are called."""

ROWS = {
    "pretrain empty.yaml": "configuration empty.yaml is empty; it needs a mapping of sections",
    "pretrain tabs.yaml": (
        "configuration tabs.yaml is not YAML that is read: found character '\\t' that cannot start any"
        " token, in line 2"
    ),
    "pretrain section.yaml": "section.yaml: launch: input should be a mapping of keys to values, but is 2",
    "pretrain nested.yaml": "nested.yaml: launch.ranks: input should be a valid integer, but is {'a': 2}",
    "pretrain text.yaml": "text.yaml: data.text: input should be a path, but is 5",
    "pretrain words.yaml": (
        "words.yaml: launch.ranks: input should be a valid integer, unable to parse string as an "
        "integer, but is 'two'"
    ),
    "pretrain half.yaml": (
        "half.yaml: launch.ranks: input should be a valid integer, got a number with a fractional "
        "part, but is 2.5"
    ),
    "pretrain fuse.yaml": (
        "fuse.yaml: charm.fuse: input should be a valid boolean, unable to interpret input, but is 'perhaps'"
    ),
    "pretrain flight.yaml": "flight.yaml: charm.flight_folder: input should be a path, but is 3",
    "pretrain nothing": "cannot read configuration nothing: Is a directory",
    "pretrain run.yaml --set =3": "setting '=3' is not SECTION.KEY=VALUE, such as megatron.train_iters=20",
    "pretrain run.yaml --set charm=ring": (
        "setting 'charm=ring' is not SECTION.KEY=VALUE, such as megatron.train_iters=20"
    ),
    "pretrain run.yaml --set charm.schedule=": (
        "run.yaml: charm.schedule: input should be a valid string, but is None"
    ),
    "pretrain run.yaml --set charm.domains=-2": (
        "run.yaml: charm.domains: input should be 'hosts', 'numa' or 'nvlink', or input should be "
        "greater than 0, or input should be a valid string, but is -2"
    ),
    "pretrain run.yaml --set variant=small": "run.yaml has no variant 'small'; it has no variants",
    "pretrain run.yaml --out run.yaml/sub": (
        "cannot write to HERE/run.yaml/sub: HERE/run.yaml is not a folder"
    ),
    "pretrain run.yaml --set data.text=run.yaml": (
        "data.text run.yaml is not a folder; give a folder of text files"
    ),
    "pretrain run.yaml --set data.text=bytes": (
        "data.text bytes holds no text, since no file in it is in UTF-8 and not empty: archive.zip, "
        "empty.txt; give files in UTF-8"
    ),
    "pretrain run.yaml --set data.text=nothing/here": (
        "data.text nothing/here holds no text, since all its files are empty: .keep; give files in UTF-8"
    ),
    "pretrain run.yaml --resume --out nothing": (
        "HERE/nothing holds no checkpoint to continue; start the run without --resume"
    ),
    "pretrain run.yaml --resume --out no_number": (
        "latest_checkpointed_iteration.txt holds 'ten\\n', which is no iteration; no checkpoint in "
        "HERE/no_number/checkpoints is whole: start the run again with another --out"
    ),
    "pretrain run.yaml --resume --out no_folder": (
        "latest_checkpointed_iteration.txt names iteration 10, but there is no folder iter_0000010; "
        "no checkpoint in HERE/no_folder/checkpoints is whole: start the run again with another --out"
    ),
    "pretrain run.yaml --resume --out file": (
        "cannot read HERE/file/checkpoints/latest_checkpointed_iteration.txt: Not a directory"
    ),
    "pretrain run.yaml --resume --out run.yaml": (
        "cannot write to HERE/run.yaml: HERE/run.yaml is not a folder"
    ),
    "pretrain run.yaml --outt x": "No such option: --outt (Possible options: --out)",
    "pretrian run.yaml": "No such command 'pretrian'. Did you mean 'pretrain'?",
    "args gpt_tiny": (
        "there is no file gpt_tiny, and no configuration of that name; did you mean 'gpt_tiny_cpu'?"
    ),
    "args list.yaml": "configuration list.yaml is not a mapping of sections but list",
    "memory empty.yaml": "configuration empty.yaml is empty; it needs a mapping of sections",
    "memory run.yaml --ranks-per-node two": (
        "Invalid value for '--ranks-per-node': Input should be a valid integer, unable to parse "
        "string as an integer"
    ),
    "plan --schedule Ring": "unknown schedule 'Ring'; did you mean 'ring'?",
    "plan --schedule ring,charm": "--schedule takes one name, but is 'ring,charm'; --compare takes several",
    "plan --compare ,": "give either --schedule NAME or --compare NAME,NAME,..",
    "plan --schedule schedule.txt": "schedule.txt is not a schedule file: their names end in .json",
    "plan --schedule latin.json": "schedule latin.json is not text in UTF-8: byte 0 is 0x80",
    "plan --schedule number.json": "schedule number.json is not a JSON object but int",
    "plan --schedule other.json": (
        "other.json is no schedule: its format is 'something else', where `charm-megatron plan "
        "--json` writes 'charm-megatron schedule'"
    ),
    "plan --schedule no_format.json": (
        "no_format.json is no schedule: it has no key 'format', where `charm-megatron plan --json` "
        "writes 'charm-megatron schedule'"
    ),
    'plan --schedule ring --mask ""': (
        "mask '': '' is not causal, none, window:LEFT,RIGHT or documents:LENGTH,..; known: causal, "
        "documents, none, window"
    ),
    "plan --schedule ring --mask window:1,2,3": (
        "mask 'window:1,2,3': 'window:1,2,3' is not causal, none, window:LEFT,RIGHT or documents:LENGTH,.."
    ),
    "plan --schedule ring --mask causal,none": (
        "mask 'causal,none': 'causal,none' is not causal, none, window:LEFT,RIGHT or "
        "documents:LENGTH,..; did you mean 'causal'?"
    ),
    'plan --schedule ring --layout ""': (
        "unknown layout ''; known: contiguous, document_zigzag, striped, zigzag"
    ),
    "plan --schedule ring --layout document_zigzag --mask documents:5,32763": (
        "document length 5 does not divide over 8 ranks in document_zigzag layout: it must be a "
        "multiple of 16, such as 16"
    ),
    "plan --schedule ring --nodes 1.5": (
        "Invalid value for '--nodes': Input should be a valid integer, unable to parse string as an integer"
    ),
    "plan --schedule ring --dtype torch.float32": (
        "--dtype 'torch.float32' is unknown; did you mean 'float32'?"
    ),
    "plan --schedule tasp --ranks-per-node 6": (
        "tasp has no plan: 6 ranks have no 5 edge-disjoint Hamiltonian rings; any other number of "
        "ranks has, such as 5 or 8, and ring takes any number"
    ),
    "plan --schedule ulysses --ranks-per-node 3": (
        "ulysses deals query heads out to 3 ranks, but 32 heads do not divide by 3; they would by 1, "
        "2, 4, 8, 16 or 32, and ring takes any number of heads"
    ),
    "plan --schedule ring --svg picture": "cannot draw picture: names of pictures end in .svg, .png, .pdf",
    "plan --schedule ring --perfetto nothing": "cannot write nothing: it is a folder",
    "plan --schedule ring --latency-s fast": (
        "Invalid value for '--latency-s': Input should be a valid number, unable to parse string as a number"
    ),
    "check": "Missing argument 'NAME|FILE|-'.",
    "check nothing.json": "cannot read schedule nothing.json: No such file or directory",
    "check ring --mask window:1": (
        "mask 'window:1': 'window:1' is not causal, none, window:LEFT,RIGHT or documents:LENGTH,.."
    ),
    "compare one": "compare takes two run folders or more",
    "compare one one": "one has no iteration with a loss in metrics.jsonl",
    "compare run.yaml one": "run.yaml is no run folder: it has no config.yaml",
    "bench operator --schedules ,": "--schedules ',' names no schedule; give some, such as ring,charm",
    "bench operator --schedules ring,ring": "a schedule is named twice: ring,ring",
    "bench operator --passes sideways": "--passes 'sideways' is not forward, backward or forward,backward",
    "bench operator --compute guessed": "--compute 'guessed' is unknown; known: modelled, real",
    "bench operator --ccr a,b": "--ccr 'a,b' is not a list of numbers, such as 0.1,0.5,1,2",
    "bench operator --ccr 0.5 --compute real": (
        "--ccr sets modelled computation, but --compute is real; give one of the two"
    ),
    "bench operator --suite huge": (
        "no suite 'huge'; known: full, quick, smoke; there are smoke: a minute: the ring, charm and "
        "torch's ring on nvlink_2x4; quick: under 10 minutes: every network, most peers, the whole "
        "curve on nvlink_2x4; full: hours: more schedules, the whole curve on every network"
    ),
    "bench operator --suite smoke --heads 4": "--suite has its own races; leave --heads out",
    "bench operator --csv nothing": "cannot write nothing: it is a folder",
    "bench operator --profile profile.yaml": "profile.yaml: key 'domains' is missing",
    "bench operator --profile nvlink_2x4 --nodes 2": (
        "--nodes and --ranks-per-node are for loopback; here the ranks are given"
    ),
    "bench operator --heads 3 --kv-heads 2": (
        "3 query heads cannot share 2 KV heads evenly; num_heads must be a multiple of num_kv_heads"
    ),
    "bench numerics --mask window:1,0": (
        "--mask 'window:1,0' is neither causal nor none, which torch's unsharded operator takes"
    ),
    'bench numerics --schedules ""': "--schedules '' names no schedule; give some, such as ring,charm",
    "bench numerics --tokens 7": (
        "sequence length 7 does not divide over 8 ranks in contiguous layout: it must be a multiple "
        "of 8, such as 8"
    ),
    "bench ablation --tokens-per-rank many": (
        "Invalid value for '--tokens-per-rank': Input should be a valid integer, unable to parse "
        "string as an integer"
    ),
    "bench ablation --json nowhere/rows.json": "cannot write nowhere/rows.json: there is no folder nowhere",
    'bench planning --schedules ""': "--schedules '' names no schedule; give some, such as ring,charm",
    "bench planning --schedules chram --sizes 2": "unknown schedule 'chram'; did you mean 'charm'?",
    "bench races": "No such command 'races'.",
    "bench tables-6-7 nothing": "nothing holds no run folder such as gpt_350m-table_6_16x2048-ring",
    "testbed up profile.yaml": "profile.yaml: key 'domains' is missing",
    "testbed exec nvlink_2x4": "Missing argument 'command'.",
    "testbed probe nvlink_2x4 --seconds nan": (
        "Invalid value for '--seconds': Input should be less than or equal to 3600"
    ),
    "testbed down missing.yaml": "cannot read configuration missing.yaml: No such file or directory",
    "launch missing.py": (
        "missing.py is not a file; give the training script to run, such as pretrain_gpt.py"
    ),
    "launch --charm-config run.yaml missing.py": (
        "run.yaml: unknown key 'launch'; known: check_calls, communicators, deadline_s, domains, flight_folder, fuse, "
        "grad_return_dtype, idle_memory_mib, keep_kv_mib, kernel, out_return_dtype, prefetch_depth, schedule, "
        "self_check, sm_margin, strict"
    ),
    "launch --charm-config flat.yaml missing.py": (
        "flat.yaml: domains: input should be 'hosts', 'numa' or 'nvlink', or input should be a valid "
        "integer, or input should be a valid string, but is ['a', 'b']"
    ),
    "version": "No such command 'version'.",
    "--verison": "No such option: --verison (Possible options: --version)",
}


def tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def said(stderr: str) -> str:
    """One line: without the word in front, and without the frame and the usage that typer prints."""
    lines = [
        line.strip("│ ") for line in stderr.splitlines() if not line.startswith(("Usage:", "Try", "╭", "╰"))
    ]
    return " ".join(line for line in lines if line).removeprefix("error: ")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ROWS)
def test_bad_input_is_refused_with_a_sentence_and_code_2_and_leaves_no_file(
    folder: Path, command: str
) -> None:
    before = tree(folder)
    result = CliRunner().invoke(app, shlex.split(command))
    assert said(result.stderr).replace(str(folder), "HERE") == ROWS[command]
    assert result.exit_code == 2
    assert tree(folder) == before
