"""Training does not depend on how the sequence is split, on the schedule, or on an interruption."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.megatron.small_run import GQA, Run, Train, Values, assert_same_curve

pytestmark = pytest.mark.megatron

SPLITS = {
    "ring on 2 ranks": (2, {"schedule": "ring"}),
    "ring on 4 ranks": (4, {"schedule": "ring"}),
    "charm on 2 domains of 2 ranks": (4, {"schedule": "charm", "domains": 2}),
    "charm on one domain of 4 ranks": (4, {"schedule": "charm", "domains": 1}),
    "charm on one domain of 3 ranks": (3, {"schedule": "charm", "domains": 1}),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["mha", "gqa"])
@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradient_norm_are_those_of_one_rank(
    train: Train, reference: Callable[[bool], Run], split: str, grouped: bool
) -> None:
    cp_size, charm = SPLITS[split]
    run = train(cp_size, charm, GQA if grouped else {})
    assert len(run.steps) == 20
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] - 0.5
    assert_same_curve(run, reference(grouped))


def test_a_run_is_resumed_with_more_ranks_and_another_schedule(
    train: Train, reference: Callable[[bool], Run]
) -> None:
    first = train(2, {"schedule": "ring"}, {"exit_interval": 10})
    assert [row["iteration"] for row in first.steps] == list(range(1, 11))
    resumed = train(4, {"schedule": "charm", "domains": 2}, out=first.folder.path, resume=True)
    assert_same_curve(resumed, reference(False))


SHORT: Values = {"train_iters": 5}
SAME: dict[str, Values] = {
    "attention recomputed": {"recompute_granularity": "selective"},
    "all recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "a list of one value a layer": {"cp_comm_type": ["charm", "charm"]},
    "the distributed optimizer": {"use_distributed_optimizer": True},
    "deterministic mode": {"deterministic_mode": True},
}


@pytest.fixture(scope="module")
def short(train: Train) -> Run:
    """Few iterations on one rank."""
    return train(megatron=SHORT)


@pytest.mark.parametrize("changes", SAME)
def test_what_does_not_concern_attention_changes_nothing(train: Train, short: Run, changes: str) -> None:
    assert_same_curve(train(2, {"domains": 1}, {**SHORT, **SAME[changes]}), short)


def test_data_parallel_ranks_change_nothing(train: Train, short: Run) -> None:
    assert_same_curve(train(2, {"domains": 1}, SHORT, ranks=4), short)


def test_tensor_parallel_ranks_change_nothing(train: Train) -> None:
    """Vocabularies are padded to the same size here, as their padding depends on the tensor-parallel size."""
    alone = train(megatron={**SHORT, "make_vocab_size_divisible_by": 128})
    tensor = {**SHORT, "make_vocab_size_divisible_by": 64, "tensor_model_parallel_size": 2}
    assert_same_curve(train(2, {"domains": 1}, tensor, ranks=4), alone)


def test_pipeline_parallel_ranks_have_a_schedule_each(train: Train) -> None:
    """Against the same pipeline, as Megatron's initial weights depend on its length."""
    pipeline: Values = {**SHORT, "pipeline_model_parallel_size": 2}
    assert_same_curve(train(2, {"domains": 1}, pipeline, ranks=4), train(1, {}, pipeline, ranks=2))


def test_experts_see_the_same_tokens(train: Train) -> None:
    """Without the balancing loss, which Megatron takes of each rank's tokens."""
    experts: Values = {
        **SHORT,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "disable_bias_linear": True,
    }
    assert_same_curve(train(2, {"domains": 1}, experts), train(megatron=experts))


@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_softmax_may_have_a_sink(train: Train, kind: str) -> None:
    """Grouped heads, so that the sink of a query head is not that of a KV head. One rank is Megatron's own."""
    sink: Values = {**SHORT, **GQA, "softmax_type": kind}
    alone, without = train(megatron=sink), train(megatron={**SHORT, **GQA})
    assert_same_curve(train(4, {"domains": 2}, sink), alone)
    assert alone.steps[-1]["loss"] != pytest.approx(without.steps[-1]["loss"], rel=0.0, abs=1e-5)


def test_every_second_layer_may_have_a_window(train: Train, short: Run) -> None:
    window: Values = {**SHORT, "window_size": "40,0", "window_attn_skip_freq": 2}
    alone = train(megatron=window)
    assert_same_curve(train(4, {"domains": 2}, window), alone)
    assert alone.steps[-1]["loss"] != pytest.approx(short.steps[-1]["loss"], rel=0.0, abs=1e-5)


def test_multi_latent_attention_has_heads_of_other_widths(train: Train) -> None:
    latent: Values = {
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "rope_type": "rope",
        "train_iters": 5,
    }
    assert_same_curve(train(2, {"domains": 1}, latent), train(megatron=latent))


def test_layers_for_multi_token_prediction_use_the_schedule_too(train: Train) -> None:
    """Charm equals the ring; one rank alone only nearly, in its gradients more than in its loss.

    Megatron takes the mean of this second loss on each rank, and the mean of these: the rank that holds the
    sequence's last token has one term less.
    """
    mtp: Values = {"mtp_num_layers": 1, "train_iters": 5}
    charm = train(4, {"schedule": "charm", "domains": 2}, mtp)
    assert_same_curve(charm, train(4, {"schedule": "ring"}, mtp))
    alone = train(megatron=mtp)
    assert_same_curve(charm, alone, tolerance=2e-3)
    pair = train(2, {"domains": 1}, mtp)
    for ours, theirs in ((pair.steps, alone.steps), (pair.evaluations, alone.evaluations)):
        losses = [row["loss"] for row in theirs]
        assert [row["loss"] for row in ours] == pytest.approx(losses, rel=0.0, abs=1e-5)


def test_a_run_folder_says_what_was_run(train: Train) -> None:
    run = train(4, {"schedule": "charm", "domains": 2}, {"train_iters": 2})
    names = {path.name for path in run.folder.path.iterdir()}
    assert names == {
        *("checkpoints", "config.yaml", "data", "evaluation.jsonl", "logs", "loss.png", "metrics.jsonl"),
        *("receipt.txt", "schedule.txt"),
    }
    assert "2 domains [0 1 | 2 3]" in run.folder.receipt.read_text("utf-8")
    assert "charm" in run.folder.schedule.read_text("utf-8")
    assert run.folder.loss_picture.read_bytes().startswith(b"\x89PNG")
    assert [row["tokens"] for row in run.steps] == [2 * 384, 4 * 384]
    assert set(run.steps[0]) == {"iteration", "loss", "grad_norm", "step_time_s", "tokens"}
    assert {row["part"] for row in run.evaluations} == {"validation", "test"}


@pytest.mark.parametrize(("cp_size", "ranks"), [(1, 2), (2, 4)])
def test_a_resumed_run_with_a_distributed_optimizer_is_that_which_was_not_stopped(
    train: Train, tmp_path: Path, cp_size: int, ranks: int
) -> None:
    """torch's Adam, without Transformer Engine or Apex; its counters of steps and moments are restored."""
    flags = {"use_distributed_optimizer": True, "train_iters": 6, "eval_iters": 0, "global_batch_size": 4}
    whole = train(cp_size, megatron=flags, ranks=ranks)
    train(cp_size, megatron={**flags, "exit_interval": 3}, ranks=ranks, out=tmp_path / "run")
    resumed = train(cp_size, megatron=flags, ranks=ranks, out=tmp_path / "run", resume=True)
    assert len(resumed.steps) == 6
    assert_same_curve(resumed, whole, tolerance=0.0)
