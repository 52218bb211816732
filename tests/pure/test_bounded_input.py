"""Whatever is given to a reader, it answers soon: with what was read, or with one declared error of one short line."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.config import load_charm_config, load_run_config, variant_names
from charm_megatron.errors import (
    MOST_MESSAGE_CHARACTERS,
    CharmError,
    InvalidInput,
    nearest,
    quoted,
    shortened,
)
from charm_megatron.limits import MOST_JSON_BYTES, MOST_YAML_BYTES
from charm_megatron.reading import parse_json, parse_yaml, whole_number
from charm_megatron.schedule.json_form import load_schedule
from charm_megatron.schedule.text import parse_action, parse_program
from charm_megatron.sharding import make_sharding, refine
from charm_megatron.testbed.profile import load_profile
from charm_megatron.topology import even_domains
from charm_megatron.topology.domain_file import load_groups
from charm_megatron.topology.from_launcher import expand_counts, ranks_of_hosts
from charm_megatron.topology.nvidia_smi import parse_addresses, parse_topology
from charm_megatron.topology.places import parse_place
from charm_megatron.topology.sysfs import cpu_list, numa_node
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import Mask, Workload, parse_mask

pytestmark = pytest.mark.pure

FUZZ_EXAMPLES = 200
"""Of each reader, where --fuzz does not say how many."""

# Of this process: other ones do not count.
ANSWER_S = 1.0
COMMAND_S = 5.0

Reader = Callable[[str], object]


def refusal(read: Callable[[], object]) -> str:
    """The message with which `read` refuses, at once."""
    started = time.process_time()
    with pytest.raises(CharmError) as caught:
        read()
    assert time.process_time() - started < ANSWER_S
    assert_short(caught.value)
    return str(caught.value)


def assert_short(error: CharmError) -> None:
    message = str(error)
    assert len(message) <= MOST_MESSAGE_CHARACTERS
    assert message.splitlines() == [message]


def written(folder: Path, text: str, name: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------- YAML

ALIAS_BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)

YAML_ROWS = [
    ("charm: {deadline_s: 2020-13-45}", "charm.deadline_s: input should be a valid number"),
    ("charm: {deadline_s: 0b_}", "'0b_' is no int, in line 1"),
    ("charm: {deadline_s: !!int abc}", "'abc' is no int"),
    ("charm: {deadline_s: !!int ''}", "'' is no int"),
    ("charm: {deadline_s: !!float abc}", "'abc' is no float"),
    ("charm: {deadline_s: !!timestamp foo}", "tag 'tag:yaml.org,2002:timestamp' is not read"),
    ("charm: {fuse: !!bool maybe}", "'maybe' is no bool"),
    ("charm: !!python/object/apply:os.system [ls]", "is not read"),
    ("charm: !!set {a}", "tag 'tag:yaml.org,2002:set' is not read"),
    (
        "charm: {deadline_s: .inf}",
        "charm.deadline_s: input should be less than or equal to 604800, but is inf",
    ),
    ("charm: {deadline_s: .nan}", "charm.deadline_s"),
    ("charm: {deadline_s: 1.0e+300}", "less than or equal to 604800, but is 1e+300"),
    ("charm: {prefetch_depth: 99999999999999999999}", "less than or equal to 65536"),
    ("charm: {domains: 99999999999999999999}", "charm.domains: "),
    ("launch: {ranks: 99999999999999999999}", "less than or equal to 131072"),
    ("[" * 5000, "nested more than 20 deep"),
    ("a: " + "{a: " * 5000, "nested more than 20 deep"),
    ("- " * 5000, "nested more than 20 deep"),
    ("megatron: {x: " + "9" * 5000 + "}", "a number has more than 40 characters"),
    ("megatron: {x: 0x" + "f" * 5000 + "}", "a number has more than 40 characters"),
    ("megatron: {x: 1" + ":59" * 5000 + ".5}", "a number has more than 40 characters"),
    ("megatron: {x: [" + "a," * 30_000 + "]}", "more than 8,192 keys and values"),
    ("#" * (MOST_YAML_BYTES + 1), "more than 65,536 bytes"),
    ("é" * (MOST_YAML_BYTES // 2 + 1), "more than 65,536 bytes"),
    (ALIAS_BOMB, "aliases are not read; write the value out, in line 2"),
    ("megatron: &a {x: *a}", "aliases are not read"),
    ("megatron: {x: 1, y: 2, x: 3}", "key 'x' is there twice, in line 1"),
    ("launch: {ranks: 1}\nlaunch: {ranks: 2}", "key 'launch' is there twice, in line 2"),
    ("megatron: {1: 1, true: 2}", "key True is there twice"),
    ("megatron: {[a]: 1}", "unhashable key"),
    ("megatron: {1: 1}", "megatron.1"),
    ('megatron: {x: "a\\0b"}', "a text holds a NUL character"),
    ('megatron: {x: "\\UFFFFFFFF"}', "is not YAML"),
    ("%YAML " + "1" * 5000 + ".1\n---\na: 1", "is not YAML"),
    ("a: 1\n---\nb: 1", "is not YAML"),
    ("variant: [a]", "has no variant ['a']; it has no variants"),
    ("variant: [a]\nvariants: {x: {}}", "has no variant ['a']; they are x"),
    ("variants: {x: {1: {}}}", "unknown key 'variants.x.1'"),
    ("variants: {1: 3}", "variants.1 is not a mapping of sections"),
    ("variants: {" + "x" * 1000 + ": 3}", "is not a mapping of sections"),
    ("<<: {a: 1}", "unknown key '<<'"),
    ("charm: {" + "x" * 1000 + ": 1}", "unknown key 'charm.xxx"),
    (
        "charm: {schedule: [" + "x, " * 5_000 + "]}",
        "charm.schedule: input should be a valid string, but is ['x'",
    ),
    ("charm: " + "x" * 10_000, "charm: "),
]


@pytest.mark.parametrize(("text", "words"), YAML_ROWS, ids=[text[:30] for text, _ in YAML_ROWS])
def test_yaml_that_is_refused_is_refused_soon_in_few_words(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text, "run.yaml")
    assert words in refusal(lambda: load_run_config(path))


@pytest.mark.parametrize(
    "value", [text.partition(": ")[2] for text, _ in YAML_ROWS if text.startswith("megatron: {x")]
)
def test_the_values_of_settings_are_read_as_files_are(tmp_path: Path, value: str) -> None:
    path = written(tmp_path, "", "run.yaml")
    path.write_text("launch: {ranks: 1}")
    refusal(lambda: load_run_config(path, [f"megatron={value}", f"megatron.x={value}"]))
    refusal(lambda: load_run_config(path, [f"megatron.x={value[:-1]}"]))
    refusal(lambda: load_run_config(path, ["x" * 10_000]))


def test_what_yaml_is_for_is_read_as_before() -> None:
    text = "a: [1, 0x10, 1.5, .inf, true, ~, text, 2020-01-02, '1', !!str 1]\nb: {c: &x {}, d: off}"
    assert parse_yaml(text, "a test", InvalidInput) == {
        "a": [1, 16, 1.5, float("inf"), True, None, "text", "2020-01-02", "1", "1"],
        "b": {"c": {}, "d": False},
    }


@pytest.mark.parametrize("read", [load_run_config, load_charm_config, variant_names, load_groups])
def test_paths_that_cannot_be_read_are_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    not_text = tmp_path / "latin.yaml"
    not_text.write_bytes(b"a: \xe9")
    assert "is not text in UTF-8: byte 3 is 0xe9" in refusal(lambda: read(not_text))
    for path in ("a\0.yaml", "a" * 5000 + ".yaml", "a" * 5000, str(tmp_path), "/dev/zero"):
        refusal(lambda path=path: read(Path(path)))


PROFILE = "{name: a, domains: 1, ranks_per_domain: 2, inside_bytes_per_s: 1000000}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PROFILE.replace("domains: 1", "domains: 10000000000"), "less than or equal to 250"),
        (PROFILE.replace("1000000", "1" + "0" * 30), "less than or equal to 1000000000000"),
        (PROFILE.replace("1000000", "1" + "0" * 60), "a number has more than 40 characters"),
        (
            "{name: a, domains: 250, ranks_per_domain: 250, inside_bytes_per_s: 1000000, across_bytes_per_s: 1000000}",
            "at most 4096 work",
        ),
        (PROFILE.replace("name: a", "name: " + "a" * 9999), "name: string should match pattern"),
    ],
)
def test_profiles_are_bounded(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text, "profile.yaml")
    assert words in refusal(lambda: load_profile(str(path)))
    refusal(lambda: load_profile("x" * 10_000))


@pytest.mark.parametrize(
    "text",
    [
        "domains: [[" + "[" * 100,
        "domains: [[node0:²]]",
        "domains: [[node0:" + "9" * 5000 + "]]",
        "domains: [[" + "n" * 5000 + "]]",
        "domains: [[a, [b, c]]]",
        "domains: [[a]]\ndomains: [[b]]",
    ],
)
def test_files_of_domains_are_bounded(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text, "domains.yaml")
    refusal(lambda: load_groups(path))


# ---------------------------------------------------------------------- schedules


def schedule_data(**problem: Any) -> dict[str, Any]:
    of_problem = {"layout": "contiguous", "cp_size": 2, "seq_len": 8, "mask": "none", "domain_of": [0, 0]}
    programs = [
        ["post 0.0 | send 1 kv0 | recv 1 kv1", "attend q0 kv0", "wait 0.0", "attend q0 kv1", "free kv1"],
        ["post 0.0 | send 0 kv1 | recv 0 kv0", "attend q1 kv1", "wait 0.0", "attend q1 kv0", "free kv0"],
    ]
    return {
        "format": "charm-megatron schedule",
        "version": 2,
        "name": "by hand",
        "problem": {**of_problem, **problem},
        "phases": [{"pass": "forward", "programs": programs}],
    }


RIGHT = json.dumps(schedule_data())
BILLION = 10**9


def with_action(text: str) -> str:
    data = schedule_data()
    data["phases"][0]["programs"][0].insert(0, text)
    return json.dumps(data)


SCHEDULE_ROWS = [
    (
        json.dumps(schedule_data(cp_size=BILLION)),
        "problem.cp_size: input should be less than or equal to 4096",
    ),
    (json.dumps(schedule_data(cp_size=4096)), "domain_of is for 2 ranks, but cp_size is 4096"),
    (json.dumps(schedule_data(cp_size=3, domain_of=[0] * 3, seq_len=9)), "2 programs for 3 ranks"),
    (
        json.dumps(schedule_data(domain_of=[0, BILLION])),
        "problem.domain_of.1: input should be less than 4096",
    ),
    (
        json.dumps(schedule_data(chunk_parts=BILLION)),
        "problem.chunk_parts: input should be less than or equal to 8192",
    ),
    (
        json.dumps(schedule_data(chunk_parts=8192, seq_len=2**40)),
        "at most 8192 chunks, but this would be 16384",
    ),
    (
        json.dumps(schedule_data(q_head_groups=BILLION)),
        "problem.q_head_groups: input should be less than or equal to",
    ),
    (
        json.dumps(schedule_data(kv_head_groups=BILLION)),
        "problem.kv_head_groups: input should be less than or equal",
    ),
    (
        json.dumps(schedule_data(seq_len=10**30)),
        "problem.seq_len: input should be less than or equal to 1099511627776",
    ),
    (
        json.dumps(
            schedule_data(layout="striped", seq_len=10**6, mask="documents:" + ",".join(["1"] * 10**6))
        ),
        "has more than",
    ),
    (
        json.dumps(
            schedule_data(layout="striped", seq_len=16_000, mask="documents:" + ",".join(["1"] * 16_000))
        ),
        "at most 8192 documents",
    ),
    (
        json.dumps(
            schedule_data(layout="striped", seq_len=16_000, mask="documents:" + ",".join(["2"] * 8_000))
        ),
        "at most 8192 chunks, but this would be 16000",
    ),
    (json.dumps(schedule_data(mask=f"window:{10**30},0")), "the most of a sequence"),
    (json.dumps(schedule_data(mask="x" * 10_000)), "is not causal, none"),
    (json.dumps(schedule_data(layout="x" * 10_000)), "unknown layout"),
    (with_action(f"post {10**20}.0 | send 1 kv0"), "is above 65536, the most steps"),
    (with_action(f"post 0.{10**20} | send 1 kv0"), "is above 65536, the most posts"),
    (with_action("post 0.0 | send ² kv0"), "is not send|recv RANK PIECE"),
    (with_action("post 0.0 | send \u0661 kv0"), "is not send|recv RANK PIECE"),
    (with_action(f"post 0.0 | send {10**20} kv0"), "the most ranks"),
    (with_action("post 0.0 | send 1 kv²"), "is not a piece"),
    (with_action("wait \u0661.0"), "is not STEP.ORDER"),
    (with_action("free kv" + "9" * 5000), "the most chunks"),
    (with_action(f"free kv0.{10**20}"), "the most head groups"),
    (with_action(f"free kv0~{10**20}"), "the most copies"),
    (with_action(f"free o0<{10**20}"), "the most ranks"),
    (with_action(f"attend q0 kv0 band 0:{10**20}"), "the most tokens"),
    (with_action("x" * 100_000), "unknown action"),
    (with_action("attend " + "q0 " * 2000 + "kv0 " * 2000), "rank 0 computes the block after the 1,048,576"),
    (RIGHT.replace('"version": 2', '"version": ' + "9" * 5000), "a number has more than 40 digits"),
    (RIGHT.replace('"version": 2', '"version": NaN'), "NaN is no number that is read"),
    (RIGHT.replace('"version": 2', '"version": 2, "version": 2'), "key 'version' is there twice"),
    (RIGHT.replace('"cp_size": 2', '"cp_size": 2, "cp_size": 2'), "key 'cp_size' is there twice"),
    (RIGHT.replace('"by hand"', json.dumps("x" * 10_000)), "name: string should have at most 255"),
    (RIGHT.replace('"forward"', json.dumps("x" * 10_000)), "unknown pass 'xxx"),
    ("[" * 100_000, "more than 65,536 lists and objects"),
    ("[" * 5_000, "nested more than 20 deep"),
    ('{"a":' * 5_000, "nested more than 20 deep"),
    ('"' + '\\"' * 10**6, "is not JSON"),
    ("[" + "0," * (2**20 + 1) + "0]", "more than 1,048,576 values"),
    ("[]", "is not a JSON object but list"),
    ("", "is not JSON"),
    ("{", "is not JSON"),
]


@pytest.mark.parametrize(("text", "words"), SCHEDULE_ROWS, ids=[words for _, words in SCHEDULE_ROWS])
def test_schedules_that_are_refused_are_refused_soon_in_few_words(
    tmp_path: Path, text: str, words: str
) -> None:
    path = written(tmp_path, text, "schedule.json")
    assert words in refusal(lambda: load_schedule(path))


def test_schedules_of_too_many_bytes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, " " * (MOST_JSON_BYTES + 1), "schedule.json")
    assert "more than 33,554,432 bytes" in refusal(lambda: load_schedule(path))
    for name in ("a\0.json", "a" * 5000 + ".json", str(tmp_path)):
        refusal(lambda name=name: load_schedule(Path(name)))


def test_brackets_in_texts_are_no_nesting() -> None:
    assert parse_json('["' + "[" * 50 + '\\"[", "]"]', "a test", InvalidInput) == ["[" * 50 + '"[', "]"]


HOSTILE_BYTES = 200 * 2**20


@pytest.mark.parametrize(
    "text",
    [ALIAS_BOMB, "[" * 60_000, "[" + "a," * 30_000 + "]", "- {a: [b, c]}\n" * 4000],
    ids=["aliases", "deep", "many", "nested"],
)
def test_hostile_yaml_takes_little_memory(tmp_path: Path, text: str) -> None:
    assert_little_memory(written(tmp_path, text, "run.yaml"), "charm_megatron.config", "load_run_config")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 30 * 2**20,
        "[" + '"ab",' * 6 * 10**6,
        "[" + "[]," * 10**7,
        json.dumps(schedule_data(cp_size=BILLION)),
    ],
    ids=["deep", "texts", "lists", "ranks"],
)
def test_hostile_json_takes_little_memory(tmp_path: Path, text: str) -> None:
    assert_little_memory(
        written(tmp_path, text, "a.json"), "charm_megatron.schedule.json_form", "load_schedule"
    )


def assert_little_memory(path: Path, module: str, reader: str) -> None:
    """In a process of its own, which tells the most memory that it had beside what imports take."""
    program = (
        f"import resource, sys; from pathlib import Path; from {module} import {reader} as read\n"
        "from charm_megatron.errors import CharmError\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = most()\n"
        "try: read(Path(sys.argv[1]))\n"
        "except CharmError: print(most() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < HOSTILE_BYTES


# ---------------------------------------------------------------------- words of masks, launchers and machines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window:²,0", "is not causal"),
        ("window:\u0661,0", "is not causal"),
        ("window:" + "9" * 5000 + ",0", "the most of a sequence"),
        ("window:-5,0", "reaches 0 or more"),
        ("documents:" + "1," * 9000 + "1", "at most 8192 documents"),
        ("documents:" + ",".join(["0"] * 8000), "documents have at least 1 token"),
        ("documents:" + ",".join([str(2**40)] * 8), "at most 1099511627776 tokens"),
        ("causal+" * 30_000, "more than 131,072 characters"),
    ],
)
def test_masks_are_bounded(text: str, words: str) -> None:
    assert words in refusal(lambda: parse_mask(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8(x1000000000000)", "more than 131,072 hosts or tasks"),
        ("8(x" + "9" * 5000 + ")", "more than 131,072 hosts or tasks"),
        ("9" * 5000, "more than 131,072 hosts or tasks"),
        ("8(x100000),8(x100000)", "more than 131,072 hosts or tasks"),
        ("²", "not of the form 4(x2),3"),
        ("\u0661(x2)", "not of the form 4(x2),3"),
        ("1," * 100_000, "more than 65,536 characters"),
    ],
)
def test_slurms_counts_are_bounded(text: str, words: str) -> None:
    assert words in refusal(lambda: expand_counts(text))
    assert words in refusal(lambda: ranks_of_hosts({"SLURM_TASKS_PER_NODE": text}, 8))


@pytest.mark.parametrize("text", ["²", "\u0661", "9" * 5000, "-1", "1e3", " 8", "", "0", "1_0"])
def test_a_launchers_variable_that_is_no_number_is_as_if_not_set(text: str) -> None:
    assert ranks_of_hosts({"LOCAL_WORLD_SIZE": text, "SLURM_JOB_NUM_NODES": text}, 8) is None


def test_whole_numbers_are_ascii_digits_up_to_a_limit() -> None:
    assert [whole_number(text, 20) for text in ("0", "007", "20")] == [0, 7, 20]
    refused = ("21", "", "²", "\u0661", "+1", "-1", " 1", "1_0", "1\n", "0x1", "9" * 5000)
    assert [text for text in refused if whole_number(text, 20) is not None] == []


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (cpu_list, "0-99999999999"),
        (cpu_list, "²"),
        (cpu_list, "0-" + "9" * 5000),
        (numa_node, "²"),
        (numa_node, "9" * 5000),
        (parse_place, "node:²"),
        (parse_place, "x" * 5000 + ":1"),
        (parse_addresses, "9" * 5000 + ", 0:0:0.0"),
        (parse_topology, "x" * 5000),
        (parse_action, "post " + "9" * 5000),
    ],
)
def test_what_machines_and_people_write_is_bounded(read: Reader, text: str) -> None:
    refusal(lambda: read(text))


# ---------------------------------------------------------------------- sizes in code


@pytest.mark.parametrize(
    "make",
    [
        lambda: even_domains(10**12, 2),
        lambda: make_sharding("zigzag", 10**12, 10**13),
        lambda: make_sharding("contiguous", 2, 2**50),
        lambda: refine(make_sharding("contiguous", 2, 2**30), 10**9),
        lambda: make_sharding("document_zigzag", 4096, 8192 * 2, (8192, 8192)),
        lambda: Mask(10**30, 0),
        lambda: Mask(documents=(10**30,)),
        lambda: Workload(1, 10**30, 1, 1, 1, 1),
        lambda: Workload(1, 8, 10**9, 1, 1, 1),
        lambda: Workload(1, 8, 10**5000, 1, 1, 1),
    ],
)
def test_sizes_are_bounded_before_anything_is_built(make: Callable[[], object]) -> None:
    refusal(make)


def test_many_documents_are_cut_soon() -> None:
    started = time.process_time()
    sharding = make_sharding("contiguous", 4096, 4096 * 64, (64,) * 4096)
    assert time.process_time() - started < ANSWER_S
    assert sharding.num_chunks == 4096


def test_messages_keep_their_beginning_and_end() -> None:
    message = str(InvalidInput("it is wrong: " + "x" * 10_000 + "\n; that would work"))
    assert len(message) == MOST_MESSAGE_CHARACTERS
    assert message.startswith("it is wrong: xxx")
    assert message.endswith("xxx ; that would work")
    assert shortened("a\n b", 80) == "a b"
    assert len(quoted(["x" * 1000] * 1000)) <= 80
    assert quoted(10**5000) == "a int of very many digits"
    assert nearest("x" * 10**6, ["a", "b"]) == "; known: a, b"


# ---------------------------------------------------------------------- commands

MANY = "9" * 20
COMMAND_ROWS = [
    (
        ("plan", "--schedule", "ring", "--ranks-per-node", MANY),
        f"--ranks-per-node must be at most 4096, but is {MANY}",
    ),
    (("plan", "--schedule", "ring", "--nodes", MANY), "--nodes must be at most 4096"),
    (
        ("plan", "--schedule", "ring", "--nodes", "4096", "--ranks-per-node", "4096"),
        "at most 4096 ranks, but 16777216",
    ),
    (("plan", "--schedule", "ring", "--tokens-per-rank", MANY), "--tokens-per-rank must be at most"),
    (("plan", "--schedule", "ring", "--tokens-per-rank", str(2**40)), "seq_len must be at most"),
    (("plan", "--schedule", "ring", "--heads", MANY), "--heads must be at most 4096"),
    (("plan", "--schedule", "ring", "--kv-heads", MANY), "--kv-heads must be at most 4096"),
    (("plan", "--schedule", "ring", "--head-dim", MANY), "--head-dim must be at most"),
    (("plan", "--schedule", "ring", "--batch", MANY), "--batch must be at most"),
    (("plan", "--schedule", "ring", "--prefetch-depth", MANY), "--prefetch-depth must be at most"),
    (("plan", "--schedule", "ring", "--rank", MANY, "--svg", "a.svg"), "rank"),
    (("plan", "--schedule", "ring", "--flops-per-s", "inf"), "must be positive and finite"),
    (("plan", "--schedule", "ring", "--flops-per-s", "nan"), "must be positive and finite"),
    (("plan", "--schedule", "ring", "--latency-s", "nan"), "both finite, but is"),
    (("plan", "--schedule", "x" * 10_000), "unknown schedule"),
    (("plan", "--schedule", "ring", "--mask", "x" * 10_000), "is not causal"),
    (("plan", "--schedule", "ring", "--svg", "a" * 5000 + ".svg"), "cannot write"),
    (("check", "ring", "--ranks-per-node", MANY), "--ranks-per-node must be at most"),
    (("check", "ring", "--nodes", MANY), "--nodes must be at most"),
    (("check", "ring", "--tokens-per-rank", MANY), "--tokens-per-rank must be at most"),
    (("check", "a" * 5000 + ".txt"), "unknown schedule"),
    (("check", "a" * 5000 + ".json"), "File name too long"),
    (("check", "/dev/zero.json"), "cannot read schedule"),
    (("memory", "gpt_tiny_cpu", "--ranks-per-node", MANY), "--ranks-per-node must be at most"),
    (("memory", "x" * 5000), "there is no file"),
    (("args", "gpt_tiny_cpu", "--set", "megatron.x=" + "[" * 5000), "nested more than 20 deep"),
    (("pretrain", "gpt_tiny_cpu", "--set", "charm.deadline_s=.inf"), "less than or equal to 604800"),
    (("bench", "operator", "--ranks-per-node", MANY), "--ranks-per-node must be at most"),
    (("bench", "operator", "--nodes", MANY), "--nodes must be at most"),
    (("bench", "operator", "--nodes", "4096", "--ranks-per-node", "4096"), "are too many for one machine"),
    (("bench", "operator", "--tokens-per-rank", MANY), "--tokens-per-rank must be at most"),
    (("bench", "operator", "--tokens-per-rank", str(2**36)), "at most fit a device"),
    (("bench", "operator", "--repetitions", MANY), "--repetitions must be at most"),
    (("bench", "operator", "--warm-up", MANY), "--warm-up must be at most"),
    (("bench", "operator", "--heads", MANY), "--heads must be at most"),
    (("bench", "operator", "--ccr", "nan"), "must be positive"),
    (("bench", "operator", "--profile", "x" * 10_000), "no test network"),
    (("bench", "numerics", "--draws", MANY), "--draws must be at most"),
    (("bench", "ablation", "--repetitions", MANY), "--repetitions must be at most"),
    (("bench", "planning", "--sizes", MANY), "from 1 to 4096"),
    (("bench", "planning", "--sizes", "²"), "from 1 to 4096"),
    (("testbed", "up", "x" * 10_000), "no test network"),
]


@pytest.mark.parametrize(
    ("words", "sentence"), COMMAND_ROWS, ids=[" ".join(words)[:60] for words, _ in COMMAND_ROWS]
)
def test_every_command_answers_sizes_without_bounds_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    result = CliRunner().invoke(app, list(words))
    assert time.process_time() - started < COMMAND_S
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert len(result.stderr) <= MOST_MESSAGE_CHARACTERS + len("error: \n")


def test_an_option_of_thousands_of_digits_is_answered_in_few_words() -> None:
    result = CliRunner().invoke(app, ["plan", "--schedule", "ring", "--nodes", "9" * 10_000])
    assert result.exit_code == 2
    assert len(result.stderr) < 1500


def test_check_reads_standard_input() -> None:
    right = CliRunner().invoke(app, ["check", "-"], input=RIGHT)
    assert right.exit_code == 0, right.output
    assert "by hand is right: 2 ranks" in right.stdout
    wrong = CliRunner().invoke(app, ["check", "-"], input=RIGHT.replace('"free kv1"', '"free kv0"'))
    assert wrong.exit_code == 1
    for text, sentence in (
        ("{", "schedule standard input is not JSON"),
        (b"\xff", "standard input is not text in UTF-8"),
        (" " * (MOST_JSON_BYTES + 1), "cannot read schedule standard input: it has more than"),
    ):
        refused = CliRunner().invoke(app, ["check", "-"], input=text)
        assert refused.exit_code == 2
        assert sentence in refused.stderr


# ---------------------------------------------------------------------- whatever comes

HOSTILE = [
    *(
        "[",
        "]",
        "{",
        "}",
        ":",
        ": ",
        ",",
        '"',
        "'",
        "\n",
        "\n  ",
        "- ",
        "? ",
        "|",
        ">",
        "#",
        "%",
        "&a ",
        "*a",
        "!!int ",
    ),
    *(
        "!!bool ",
        "!!timestamp ",
        "!!set ",
        "!!binary ",
        "!x ",
        "<<: ",
        "=",
        "\\",
        "\\UFFFFFFFF",
        "\0",
        "\x85",
        "\ufeff",
    ),
    *(
        "²",
        "\u0661",
        "é",
        "0",
        "1",
        "-1",
        "9" * 25,
        "9" * 5000,
        "1e999",
        "0x",
        "0b_",
        "0o8",
        ".inf",
        ".nan",
        "1:59:59.5",
    ),
    *(
        "2020-13-45",
        "2020-01-01",
        "null",
        "~",
        "true",
        "x" * 400,
        "[" * 60,
        "{a: " * 40,
        "a: &a [*a]\n",
        "---\n",
        "...\n",
    ),
    *(
        " ",
        "\t",
        "+",
        "<",
        ".",
        "~1",
        "|",
        "(",
        ")",
        "(x",
        "band ",
        "causal",
        "kv0",
        "q1",
        "o1<0",
        "dkv1.1",
        "\r",
    ),
]
"""What readers stumble over, put where it was not expected."""


def damaged(*right: str, words: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    """Texts that are right but for a few places, and texts of parts that nobody would put together."""
    parts = st.one_of(st.sampled_from([*HOSTILE, *words]), st.text(max_size=4), st.integers().map(str))
    cuts = st.tuples(st.floats(0, 1), st.floats(0, 0.2), parts)

    def damage(text: str, places: list[tuple[float, float, str]]) -> str:
        for start, width, part in places:
            first = int(start * len(text))
            text = text[:first] + part + text[first + int(width * len(text)) :]
        return text

    return st.one_of(
        st.builds(damage, st.sampled_from(right), st.lists(cuts, max_size=3)),
        st.lists(parts, max_size=12).map("".join),
    )


def damaged_data() -> st.SearchStrategy[str]:
    """The JSON of schedules with a value here or there that does not belong."""
    numbers = st.sampled_from(
        [0, -1, 1, 2, 3, 4095, 4096, 2**31, 2**40, 2**63, 10**20, 10**30, True, 1.5, 1e300]
    )
    values = st.one_of(numbers, st.sampled_from(HOSTILE), st.none(), st.just([]), st.just({}), st.just([[]]))
    keys = st.sampled_from(
        [*schedule_data()["problem"], "q_head_groups", "kv_head_groups", "chunk_parts", "x"]
    )
    actions = damaged(
        *schedule_data()["phases"][0]["programs"][0], "attend q0 kv0 band 0:3", "accumulate o0<1", "free q1~1"
    )

    def build(problem: dict[str, Any], changes: dict[str, Any], places: list[tuple[int, int, str]]) -> str:
        data = {**schedule_data(**problem), **changes}
        for rank, position, action in places:
            with suppress(TypeError, IndexError, KeyError):
                data["phases"][0]["programs"][rank].insert(position, action)
        return json.dumps(data)

    places = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), actions), max_size=3)
    masks = st.sampled_from(["causal", "window:2,1", "documents:3,5", "causal+documents:8"])
    layouts = st.sampled_from(["zigzag", "striped", "document_zigzag", "contiguous"])
    problem = st.fixed_dictionaries({}, optional={"mask": masks, "layout": layouts})
    return st.builds(
        build,
        st.builds(lambda a, b: {**a, **b}, problem, st.dictionaries(keys, values, max_size=2)),
        st.dictionaries(st.sampled_from([*schedule_data(), "options", "x"]), values, max_size=1),
        places,
    )


class Fuzz:
    """Readers of files and of texts, each as a function of a text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _written(self, text: str, name: str) -> Path:
        path = self._folder / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path

    def config(self, text: str) -> None:
        load_run_config(self._written(text, "run.yaml"))

    def settings(self, text: str) -> None:
        load_run_config(Path("gpt_tiny_cpu"), [f"charm.deadline_s={text}", text])

    def charm_config(self, text: str) -> None:
        load_charm_config(self._written(text, "charm.yaml"))

    def profile(self, text: str) -> None:
        load_profile(str(self._written(text, "profile.yaml")))

    def domain_file(self, text: str) -> None:
        load_groups(self._written(text, "domains.yaml"))

    def schedule_text(self, text: str) -> None:
        parse_program(text.splitlines())

    def schedule_file(self, text: str) -> None:
        loaded = load_schedule(self._written(text, "schedule.json"))
        for schedule in loaded.schedules:
            with suppress(CharmError):  # a picture of the fault, of several lines
                check_schedule(schedule)

    def mask(self, text: str) -> None:
        str(parse_mask(text))

    def counts(self, text: str) -> None:
        expand_counts(text)

    def launcher(self, text: str) -> None:
        names = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES")
        for name in names:
            ranks_of_hosts({name: text}, 8)


CONFIG = (
    "variant: a\nlaunch: {ranks: 2}\ncharm: {schedule: ring, domains: 2}\nmegatron: {lr: 1.0e-3, x: [1, b]}\n"
)
VARIANTS = "variants:\n  a: {megatron: {lr: 2}}\n  b: {launch: {ranks: 4}}\n"
PROGRAM = "\n".join(schedule_data()["phases"][0]["programs"][0])

FUZZED: dict[str, st.SearchStrategy[str]] = {
    "config": damaged(CONFIG, CONFIG + VARIANTS),
    "settings": damaged("charm.fuse=true", "variant=a", "megatron.x=[1, {a: b}]", "300.0"),
    "charm_config": damaged("schedule: ring\ndomains: numa\ndeadline_s: 3.5\nfuse: false\n"),
    "profile": damaged(PROFILE, PROFILE.replace(", ", "\n").strip("{}")),
    "domain_file": damaged("domains: [[node1, node2], [node3:0], [node3:1]]"),
    "schedule_text": damaged(PROGRAM, "attend q0.1 kv0~2 band -1:7\naccumulate o3<5\nfree dkv1.1~1"),
    "schedule_file": st.one_of(damaged_data(), damaged(RIGHT)),
    "mask": damaged("causal", "window:5,0+documents:3,5", "none", words=("window:", "documents:", "1,")),
    "counts": damaged("4(x2),3", "8", "16(x4)"),
    "launcher": damaged("8", "4(x2)", "2"),
}


@pytest.mark.parametrize("reader", FUZZED)
def test_whatever_comes_is_read_or_refused_in_one_line(
    reader: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As many texts as --fuzz says; the same ones each time where it is not given."""
    num_examples = request.config.getoption("--fuzz") or FUZZ_EXAMPLES
    read: Reader = getattr(Fuzz(tmp_path), reader)

    @settings(
        max_examples=num_examples,
        derandomize=num_examples == FUZZ_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(FUZZED[reader])
    def run(text: str) -> None:
        started = time.process_time()
        try:
            read(text)
        except CharmError as error:
            assert_short(error)
        assert time.process_time() - started < ANSWER_S

    run()
