"""Run configurations are strict, and say what is wrong in one line."""

import pytest
from pydantic import ValidationError

from charm_megatron.config import CharmConfig, load_run_config, variant_names
from charm_megatron.errors import ConfigError

pytestmark = pytest.mark.pure


def load(tmp_path, text, overrides=()):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run_config(path, list(overrides))


def test_a_file_is_read_and_settings_are_applied_in_order(tmp_path):
    config = load(
        tmp_path,
        "launch: {ranks: 4}\ncharm: {schedule: ring}\nmegatron: {lr: 1.0e-3, cp_comm_type: [charm, p2p]}",
        ["megatron.train_iters=20", "charm.domains=2", "charm.domains=4"],
    )
    assert config.launch.ranks == 4
    assert config.charm == CharmConfig(schedule="ring", domains=4)
    assert config.megatron == {"lr": 1.0e-3, "cp_comm_type": ["charm", "p2p"], "train_iters": 20}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("charm: {shedule: ring}", "unknown key 'charm.shedule'; did you mean 'schedule'?"),
        ("lunch: {ranks: 2}", "unknown key 'lunch'; did you mean 'launch'?"),
        ("charm: {domains: none}", "charm.domains"),
        ("charm: {out_return_dtype: fp8}", "but is 'fp8'"),
        ("launch: {ranks: 0}", "launch.ranks: input should be greater than 0, but is 0"),
        ("- a\n- b", "is not a mapping of sections but list"),
        ("a: [", "is not YAML"),
        ("charm: 3", "charm"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read configuration .*: No such file"):
        load_run_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("override", ["megatron.lr", "lr=3", "a.b.c=1", "=1", "charm.=2"])
def test_a_setting_that_is_not_section_key_value_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match=r"SECTION.KEY=VALUE"):
        load(tmp_path, "launch: {ranks: 1}", [override])


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        CharmConfig().schedule = "ring"


VARIANTS = """
variant: short
megatron: {lr: 1.0e-3, seq_length: 0}
variants:
  short: {megatron: {seq_length: 8}}
  long: {megatron: {seq_length: 16}, launch: {ranks: 2}}
"""


def test_a_variant_is_laid_over_the_file_and_settings_over_both(tmp_path):
    assert load(tmp_path, VARIANTS).megatron == {"lr": 1.0e-3, "seq_length": 8}
    config = load(tmp_path, VARIANTS, ["variant=long", "megatron.lr=2.0"])
    assert (config.megatron, config.launch.ranks) == ({"lr": 2.0, "seq_length": 16}, 2)
    config = load(tmp_path, VARIANTS, ["megatron.seq_length=4", "variant=long"])
    assert config.megatron["seq_length"] == 4
    assert variant_names(tmp_path / "run.yaml") == ("short", "long")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (VARIANTS, ["variant=lnog"], "has no variant 'lnog'; they are short, long"),
        (VARIANTS.replace("variant: short", ""), [], "has no variant None; they are short, long"),
        ("launch: {ranks: 2}", ["variant=long"], "has no variants"),
        ("variants: {a: {lunch: {}}}", [], "unknown key 'variants.a.lunch'; did you mean 'launch'?"),
        ("variants: {a: {launch: 3}}", ["variant=a"], "variants.a is not a mapping of sections"),
        ("variants: 3", [], "variants is not a mapping of sections"),
        ("variant: a\nvariants: {a: {charm: {shedule: ring}}}", [], "unknown key 'charm.shedule'"),
        ("launch: 3\nvariants: {a: {launch: {ranks: 2}}}", ["variant=a"], "launch"),
    ],
)
def test_a_wrong_variant_is_one_line(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
