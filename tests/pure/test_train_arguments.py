"""YAML names and values -> a command line in Megatron's spelling, with a small parser in the place of Megatron's."""

import argparse

import pytest

from charm_megatron.config import MegatronValue
from charm_megatron.errors import ConfigError
from charm_megatron.train.arguments import effective_flags, to_argv
from charm_megatron.train.flags import CPU_NEEDS, OWNED

pytestmark = pytest.mark.pure


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--override-opt_param-scheduler", action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    parser.add_argument("--cp-comm-type", nargs="+", type=str)
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
    return parser


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_layers", 2, ["--num-layers=2"]),
        ("num_layers", -2, ["--num-layers=-2"]),
        ("num_layers", None, []),
        ("override_opt_param_scheduler", True, ["--override-opt_param-scheduler"]),
        ("override_opt_param_scheduler", False, []),
        ("no_rope_fusion", True, ["--no-rope-fusion"]),
        ("cp_comm_type", "charm", ["--cp-comm-type", "charm"]),
        ("cp_comm_type", ["charm", "p2p"], ["--cp-comm-type", "charm", "p2p"]),
        ("cache", True, ["--cache"]),
        ("cache", False, ["--no-cache"]),
    ],
)
def test_a_value_becomes_the_words_of_its_flag(
    parser: argparse.ArgumentParser, name: str, value: MegatronValue, words: list[str]
) -> None:
    assert to_argv({name: value}, parser) == words
    parser.parse_args(words)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_layer", 2, "megatron.num_layer is not a flag of Megatron; did you mean 'num_layers'?"),
        ("zzz", 2, "megatron.zzz is not a flag of Megatron; did you mean"),
        ("num_layers", True, "megatron.num_layers needs a value, not a bare true"),
        ("num_layers", [1, 2], r"megatron.num_layers takes one value, but is \[1, 2\]"),
        ("no_rope_fusion", 3, "megatron.no_rope_fusion is a switch: true or false, but is 3"),
    ],
)
def test_a_value_that_does_not_fit_is_one_sentence(
    parser: argparse.ArgumentParser, name: str, value: MegatronValue, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        to_argv({name: value}, parser)


def test_what_a_cpu_needs_is_added_only_without_cuda() -> None:
    assert CPU_NEEDS.items() <= effective_flags({}, cuda=False).items()
    assert not CPU_NEEDS.keys() & effective_flags({}, cuda=True).keys()


def test_what_is_written_stays_or_is_refused() -> None:
    assert effective_flags({"split": "80,10,10", "num-layers": 2}, cuda=True)["split"] == "80,10,10"
    assert effective_flags({"num-layers": 2}, cuda=True)["num_layers"] == 2
    with pytest.raises(ConfigError, match="distributed_backend must be 'gloo' without CUDA, but is 'nccl'"):
        effective_flags({"distributed_backend": "nccl"}, cuda=False)


@pytest.mark.parametrize("name", OWNED)
def test_flags_that_a_run_sets_itself_must_be_left_out(name: str) -> None:
    with pytest.raises(ConfigError, match=f"megatron.{name} must be left out: "):
        effective_flags({name: "anything"}, cuda=True)


def test_our_attention_is_chosen_where_the_sequence_is_split() -> None:
    assert effective_flags({"context_parallel_size": 2}, cuda=True)["cp_comm_type"] == "charm"
    assert "cp_comm_type" not in effective_flags({"context_parallel_size": 1}, cuda=True)


def test_types_of_transformer_engine_may_be_named_where_its_layers_are_used() -> None:
    flags = {"context_parallel_size": 2, "cp_comm_type": ["charm", "p2p"]}
    assert effective_flags(flags, cuda=True)["cp_comm_type"] == ["charm", "p2p"]
    for cuda, more in ((True, {"transformer_impl": "local"}), (False, {})):
        with pytest.raises(ConfigError, match="cp_comm_type 'p2p' needs Transformer Engine"):
            effective_flags({**flags, **more}, cuda=cuda)
    with pytest.raises(ConfigError, match="cp_comm_type 'p2' is unknown; did you mean 'p2p'"):
        effective_flags({**flags, "cp_comm_type": "p2"}, cuda=True)
