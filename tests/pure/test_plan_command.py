"""`charm-megatron plan` and `charm-megatron check`, as a user meets them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.planner import shipped_planners
from charm_megatron.schedule.json_form import to_json
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.topology import Domains
from charm_megatron.units import bytes_text
from charm_megatron.workload import Workload

pytestmark = pytest.mark.pure

PLANNERS = shipped_planners()

SMALL = [
    "--nodes",
    "2",
    "--ranks-per-node",
    "2",
    "--tokens-per-rank",
    "64",
    "--heads",
    "4",
    "--head-dim",
    "8",
]
CHARM = ["plan", "--schedule", "charm", *SMALL]


@pytest.fixture
def run():
    """Runs a command line; the terminal is 200 characters wide."""
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return lambda *args, env=None: runner.invoke(app, [str(arg) for arg in args], env=env)


def rows(text, label):
    """The cells of each line that begins with `label`."""
    return [
        line.split()[len(label.split()) :] for line in text.splitlines() if line.strip().startswith(label)
    ]


# ---------------------------------------------------------------------- plan


def test_plan_prints_the_grid_and_the_numbers_of_both_passes(run):
    result = run(*CHARM)
    assert result.exit_code == 0, result.output
    assert "charm forward" in result.stdout
    assert "charm backward" in result.stdout
    assert "q0 q7 kv0 kv7 causal" in result.stdout
    assert "g0 g7 kv0 kv7 causal" in result.stdout
    assert rows(result.stdout, "longest chain of transfers that need each other:") == [["4"], ["4"]]


def test_a_pass_may_be_asked_for_alone(run):
    result = run(*CHARM, "--pass", "backward")
    assert "charm forward" not in result.stdout
    assert "charm backward" in result.stdout


def test_pictures_and_times_may_be_those_of_nccl(run, tmp_path):
    arguments = ("plan", "--compare", "charm,double_ring", *SMALL, "--pass", "forward")
    result = run(*arguments, "--communicators", "two", "--svg", tmp_path / "two.svg")
    assert "2 NCCL communicators" in result.stdout
    assert "2 NCCL communicators" in (tmp_path / "two.svg").read_text("utf-8")
    assert "1 NCCL communicator\n" in run(*arguments, "--communicators", "one").stdout
    refused = run(*arguments, "--communicators", "two", "--fuse")
    assert refused.exit_code == 2
    assert "posts are made lane by lane; leave --fuse out" in refused.stderr


def test_the_table_counts_what_each_rank_sends(run):
    """A ring over 2 x 2 ranks, no mask: three KVs a rank, over the one link that it has; four are held at one time."""
    result = run(
        "plan", "--schedule", "ring", *SMALL, "--layout", "contiguous", "--mask", "none", "--pass", "forward"
    )
    kv_bytes = 64 * 4 * (8 + 8) * 2
    three, four = ([*bytes_text(n * kv_bytes).split(), f"({n})"] for n in (3, 4))
    inside, across = [*three, "0", "B", "(0)"], ["0", "B", "(0)", *three]
    per_rank = [row for label in "0123" for row in rows(result.stdout, label) if "25.0%" in row]
    assert per_rank == [
        [node, "4", "25.0%", *links, *four]
        for node, links in (("0", inside), ("0", across), ("1", inside), ("1", across))
    ]
    assert rows(result.stdout, "total")[0][:2] == ["16", "100.0%"]


def test_of_many_ranks_a_few_are_shown_unless_all_are_asked_for(run):
    args = ["plan", "--schedule", "ring", "--nodes", "2", "--ranks-per-node", "8", "--pass", "forward"]
    few, all_ = run(*args), run(*args, "--all-ranks")
    assert "Shown: 8 of 16 ranks, 16 of 16 steps. --all-ranks shows all." in few.stdout
    assert "rank 15" not in few.stdout
    assert "rank 15" in all_.stdout
    assert "Shown" not in all_.stdout


def test_columns_that_do_not_fit_side_by_side_go_below_and_stay_whole(run):
    runner_width = 80
    result = run(*CHARM, "--pass", "forward", env={"COLUMNS": str(runner_width)})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= runner_width
    assert len(rows(result.stdout, "step")) == 3  # twice the grid, and "steps with transfers"
    assert "q3 q4 kv3 kv4 causal" in result.stdout
    assert len(rows(result.stdout, "total")) == 1
    assert "most bytes at one time" in result.stdout


@pytest.mark.parametrize("name", PLANNERS)
def test_json_is_all_of_standard_output_and_checks(run, tmp_path, name):
    layout = "contiguous" if name == "dist_flash" else "zigzag"
    size = [
        "--nodes",
        "1",
        "--ranks-per-node",
        "3",
        "--tokens-per-rank",
        "12",
        "--heads",
        "6",
        "--layout",
        layout,
    ]
    if name in ("attention_2d", "mesh", "hierarchical", "hierarchical_ring_inside"):
        size[:4] = ["--nodes", "2", "--ranks-per-node", "2"]
        size[7] = "8"
    result = run("plan", "--schedule", name, *size, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["name"] == name
    file = tmp_path / "schedule.json"
    file.write_text(result.stdout, encoding="utf-8")
    checked = run("check", file)
    assert checked.exit_code == 0, checked.output
    assert f"{name} is right" in checked.stdout
    assert all(rows(checked.stdout, phase["pass"]) for phase in data["phases"])


def test_json_of_one_pass_has_that_pass_alone(run):
    data = json.loads(run(*CHARM, "--json", "--pass", "backward").stdout)
    assert [phase["pass"] for phase in data["phases"]] == ["backward"]


def test_options_reach_the_schedule(run):
    plain = json.loads(run(*CHARM, "--json", "--pass", "forward").stdout)
    other = json.loads(run(*CHARM, "--json", "--pass", "forward", "--prefetch-depth", "2", "--fuse").stdout)
    assert plain["options"] == {"prefetch_depth": 1, "fuse": False}
    assert other["options"] == {"prefetch_depth": 2, "fuse": True}


def test_wider_returns_send_more(run):
    """Per rank of 2 x 1, no mask, forward: a Q, and an output with lse, in bfloat16 or float32."""
    args = [
        "plan",
        "--schedule",
        "pass_q",
        *SMALL,
        "--nodes",
        "1",
        "--layout",
        "contiguous",
        "--mask",
        "none",
    ]
    for dtype, width in (("model", 2), ("float32", 4)):
        result = run(*args, "--pass", "forward", "--out-return-dtype", dtype)
        expected = bytes_text(64 * 4 * (8 * 2 + 8 * width + 4))
        assert " ".join(rows(result.stdout, "most")[0][2:4]) == expected


# ---------------------------------------------------------------------- comparison


def test_compare_puts_schedules_side_by_side_against_the_first(run):
    result = run(
        "plan",
        "--compare",
        "ring,rm_plus,charm",
        "--nodes",
        "2",
        "--ranks-per-node",
        "4",
        "--pass",
        "forward",
    )
    assert result.exit_code == 0, result.output
    assert rows(result.stdout, "steps")[0] == ["7", "5", "9"]
    assert (
        rows(result.stdout, "compute steps") == [["8", "5", "8"]]
    )  # charm: three own exchanges and those of a visit, the own block, and an empty step on either side of the visit
    assert rows(result.stdout, "longest chain of transfers") == [["7", "2", "4"]]
    speeds = rows(result.stdout, "speed, ring = 1")[0]
    assert speeds[0] == "1.00"
    assert 1 < float(speeds[1]) < float(speeds[2])
    times = {
        label: [float(word) for word in rows(result.stdout, label)[0][::2]]
        for label in ("computation alone", "time, a link for each transfer", "time, shared links")
    }
    for alone, own, shared in zip(*times.values(), strict=True):
        assert alone <= own <= shared


def test_compared_times_follow_the_rates_given(run):
    """Two ranks, one hop of KV, no computation to speak of: latency and bytes over the rate."""
    kv_bytes = 64 * 4 * (8 + 8) * 2
    rates = ["--flops-per-s", "1e30", "--inside-bytes-per-s", kv_bytes * 1000, "--latency-s", "0.002"]
    result = run(
        "plan",
        "--compare",
        "ring,all_gather",
        *SMALL,
        "--nodes",
        "1",
        "--pass",
        "forward",
        "--mask",
        "none",
        *rates,
    )
    assert rows(result.stdout, "time, shared links") == [["3.000", "ms", "3.000", "ms"]]


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_pictures_are_written_by_suffix(run, tmp_path, name, start):
    result = run(*CHARM, "--svg", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert result.stderr == f"wrote {tmp_path / name}\n"


def test_pictures_of_comparisons_and_of_one_rank(run, tmp_path):
    compared = run("plan", "--compare", "ring,charm", *SMALL, "--svg", tmp_path / "both.svg")
    alone = run(*CHARM, "--rank", "3", "--own-links", "--svg", tmp_path / "rank.svg")
    assert compared.exit_code == alone.exit_code == 0
    assert (tmp_path / "both.svg").stat().st_size > 10_000
    assert (tmp_path / "rank.svg").stat().st_size > 10_000


def test_a_trace_is_written_and_json_stays_clean_beside_it(run, tmp_path):
    result = run(*CHARM, "--json", "--perfetto", tmp_path / "trace.json")
    assert json.loads(result.stdout)["name"] == "charm"
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}


# ---------------------------------------------------------------------- bad input


def assert_refused(result, *parts):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--schedule", "chram"], ["unknown schedule 'chram'", "did you mean 'charm'?"]),
        (["--schedule", "ring", "--layout", "zigzg"], ["did you mean 'zigzag'?"]),
        (["--schedule", "ring", "--mask", "casual"], ["did you mean 'causal'?"]),
        (["--schedule", "ring", "--mask", "window:3"], ["window:LEFT,RIGHT"]),
        (["--schedule", "ring", "--mask", "causal+documents:5,6"], ["documents have 11 tokens"]),
        (["--schedule", "ring", "--dtype", "bfloat61"], ["--dtype 'bfloat61'", "did you mean 'bfloat16'?"]),
        (["--schedule", "ring", "--pass", "forwards"], ["--pass 'forwards'", "did you mean 'forward'?"]),
        (["--schedule", "ring", "--out-return-dtype", "fp32"], ["--out-return-dtype 'fp32'", "model"]),
        (["--schedule", "ring", "--grad-return-dtype", "modle"], ["did you mean 'model'?"]),
        (["--schedule", "ring", "--nodes", "0"], ["--nodes must be at least 1, but is 0"]),
        (["--schedule", "ring", "--ranks-per-node", "-3"], ["--ranks-per-node must be at least 1"]),
        (["--schedule", "ring", "--prefetch-depth", "0"], ["--prefetch-depth must be at least 1"]),
        (["--schedule", "ring", "--heads", "0"], ["--heads must be at least 1"]),
        (["--schedule", "ring", "--tokens-per-rank", "7"], ["does not divide", "multiple of 16"]),
        (["--schedule", "ring", "--heads", "8", "--kv-heads", "3"], ["cannot share 3 KV heads evenly"]),
        (["--schedule", "ulysses", "--heads", "6"], ["ulysses"]),
        (["--schedule", "ring", "--flops-per-s", "0"], ["--flops-per-s"]),
        (["--schedule", "ring", "--inside-bytes-per-s", "-1"], ["positive rate"]),
        (["--schedule", "ring", "--latency-s", "-1"], ["no negative latency"]),
        (["--schedule", "ring", "--rank", "1"], ["--rank", "--svg"]),
        ([], ["--schedule NAME", "--compare"]),
        (["--schedule", "ring", "--compare", "ring,charm"], ["either --schedule NAME or --compare"]),
        (["--compare", "ring,chram"], ["did you mean 'charm'?"]),
        (["--compare", "ring,charm", "--json"], ["--json writes one schedule"]),
    ],
)
def test_bad_input_to_plan_is_one_sentence_and_exit_code_2(run, args, parts):
    assert_refused(run("plan", *args), *parts)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--svg", "a.gif"], ["a.gif", ".svg, .png, .pdf"]),
        (["--svg", "no/a.svg"], ["there is no folder"]),
        (["--perfetto", "no/a.json"], ["there is no folder"]),
        (["--svg", "a.svg", "--rank", "8"], ["0 to 3"]),
        (["--svg", "a.svg", "--perfetto", "folder"], ["cannot write", "folder"]),
    ],
)
def test_files_that_cannot_be_written_are_refused_and_nothing_is_left(
    run, tmp_path, monkeypatch, args, parts
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert_refused(run(*CHARM, *args), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# ---------------------------------------------------------------------- check


@pytest.fixture
def saved(run, tmp_path):
    """A file with both passes of charm over 2 x 2 ranks, and what is in it."""
    text = run(*CHARM, "--json").stdout
    file = tmp_path / "charm.json"
    file.write_text(text, encoding="utf-8")
    return file, json.loads(text)


def test_check_sums_up_each_pass(run, saved):
    result = run("check", saved[0])
    assert result.exit_code == 0
    assert "charm is right: 4 ranks on 2 nodes, zigzag, mask causal, 256 tokens" in result.stdout
    forward = rows(result.stdout, "forward")[0]
    # steps: an own exchange, an empty step, a visit's, outputs home by two hops; blocks: 8 * 9 / 2; messages: the own
    # KV, Q across and its output, and a visit's KV or, there and back, Q
    assert forward[:3] == ["6", "36", "18"]
    assert " ".join(forward[3:]).startswith("8 kv, 8 o, 8 q")


def test_a_faulty_schedule_ends_with_code_1_and_its_first_fault(run, saved):
    file, data = saved
    program = data["phases"][1]["programs"][2]
    del program[next(i for i, action in enumerate(program) if action.startswith("wait"))]
    file.write_text(json.dumps(data), encoding="utf-8")
    result = run("check", file)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "rank 2, action" in result.stderr
    assert "is not here yet" in result.stderr
    assert "-->" in result.stderr


def test_cargo_of_another_pass_is_a_fault(run, saved):
    file, data = saved
    data["phases"][0]["pass"] = "backward"
    file.write_text(json.dumps(data), encoding="utf-8")
    assert run("check", file).exit_code == 1


def test_a_schedule_for_another_group_is_refused(run, saved):
    file, _ = saved
    assert run("check", file, "--nodes", "2", "--ranks-per-node", "2").exit_code == 0
    assert_refused(run("check", file, "--nodes", "4"), "is for 2 nodes, not 4")
    assert_refused(run("check", file, "--ranks-per-node", "8"), "is for 2 ranks on a node, not 8")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda text: text[:200], ["is not JSON"]),
        (lambda text: "[]", ["is not a JSON object"]),
        (lambda text: text.replace('"version": 2', '"version": 9'), ["version 9", "version 2 is read"]),
        (lambda text: text.replace('"cp_size": 4', '"cp_size": "four"'), ["cp_size"]),
        (lambda text: text.replace('"layout"', '"layuot"'), ["problem.layout", "required"]),
        (lambda text: text.replace("attend", "atend", 1), ["did you mean 'attend'?"]),
        (lambda text: text.replace('"zigzag"', '"zigzig"'), ["did you mean 'zigzag'?"]),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(run, saved, change, parts):
    file, _ = saved
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    assert_refused(run("check", file), *parts)


def test_a_file_that_is_not_there_is_refused(run, tmp_path):
    assert_refused(run("check", tmp_path / "none.json"), "cannot read schedule", "No such file")
    assert_refused(run("plan", "--schedule", tmp_path / "none.json"), "cannot read schedule", "No such file")


def test_a_planners_schedule_is_planned_and_checked(run):
    result = run("check", "charm", "--nodes", "2", "--ranks-per-node", "4")
    assert result.exit_code == 0, result.output
    assert "charm is right: 8 ranks on 2 nodes, zigzag, mask causal, 32768 tokens" in result.stdout
    assert all(rows(result.stdout, direction) for direction in DIRECTIONS)
    assert (
        "1 nodes, contiguous, mask none"
        in run("check", "rm_plus", "--layout=contiguous", "--mask=none").stdout
    )


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["chram"], ["unknown schedule 'chram'", "did you mean 'charm'?"]),
        (["dist_flash"], ["dist_flash", "contiguous"]),
        (["charm", "--nodes", "0"], ["--nodes must be at least 1, but is 0"]),
        (["pyproject.toml"], ["pyproject.toml is not a schedule file: their names end in .json"]),
    ],
)
def test_what_cannot_be_planned_cannot_be_checked(run, monkeypatch, args, parts):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert_refused(run("check", *args), *parts)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--mask=none", "is for mask causal, not none"),
        ("--layout=striped", "is for layout zigzag, not striped"),
        ("--tokens-per-rank=32", "is for 64 tokens per rank, not 32"),
    ],
)
def test_a_schedule_for_other_attention_is_refused(run, saved, option, message):
    assert_refused(run("check", saved[0], option), message)
    assert run("check", saved[0], "--mask=causal", "--layout=zigzag", "--tokens-per-rank=64").exit_code == 0


# ---------------------------------------------------------------------- plans of files

HEADS = ["--heads", "4", "--head-dim", "8"]


def test_a_file_is_planned_like_the_schedule_that_it_was_written_from(run, saved):
    file, data = saved
    assert json.loads(run("plan", "--schedule", file, *HEADS, "--json").stdout) == data
    shown, planned = run("plan", "--schedule", file, *HEADS), run(*CHARM)
    assert shown.exit_code == 0, shown.output
    assert "2 x 2 ranks, zigzag, mask causal, 64 tokens per rank, 4 heads x 8" in shown.stdout
    assert f"{data['name']} as written" in shown.stdout
    for label in ("total", "most", "least", "busiest rank computes", "buffer pool:"):
        assert rows(shown.stdout, label) == rows(planned.stdout, label)


def test_a_file_is_compared_with_planners_on_the_group_of_the_file(run, saved):
    file, _ = saved
    result = run("plan", "--compare", f"ring,charm,{file}", *HEADS, "--pass", "forward")
    assert result.exit_code == 0, result.output
    assert "2 x 2 ranks, zigzag, mask causal, 64 tokens per rank" in result.stdout
    for label in ("steps", "longest chain of transfers", "speed, ring = 1"):
        ring, charm, written = rows(result.stdout, label)[0]
        assert charm == written != ring


def test_a_file_may_be_for_domains_that_no_option_describes(run, tmp_path):
    domains = Domains((0, 0, 0, 1))
    workload = Workload(1, 64, 4, 4, 8, 8)
    plan = compile_attention(CharmConfig(schedule="rm_plus"), domains, workload, "zigzag")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(to_json("mine", plan.schedules)), "utf-8")
    result = run("plan", "--compare", f"charm,{file}", *HEADS, "--pass", "forward")
    assert result.exit_code == 0, result.output
    assert "4 ranks in domains [0 1 2 | 3], zigzag, mask causal, 16 tokens per rank" in result.stdout
    assert "rm_plus in place of charm" in result.stdout
    charm, mine = rows(result.stdout, "steps")[0]
    assert charm == mine


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (
            ["--layout", "striped"],
            ["is for 4 ranks", "zigzag layout", "but this group has", "striped layout"],
        ),
        (["--mask", "none"], ["mask causal", "but this group has", "mask none"]),
        (["--tokens-per-rank", "32"], ["256 tokens", "but this group has", "128 tokens"]),
        (["--nodes", "4"], ["is for 4 ranks", "but this group has 8 ranks"]),
        (["--ranks-per-node", "1"], ["is for 4 ranks", "but this group has 2 ranks"]),
        (["--prefetch-depth", "2"], ["--prefetch-depth is for planners", "leave the option out"]),
        (["--no-fuse"], ["--fuse/--no-fuse is for planners", "leave the option out"]),
    ],
)
def test_options_that_contradict_a_file_are_refused(run, saved, args, parts):
    assert_refused(run("plan", "--schedule", saved[0], *HEADS, *args), *parts)
