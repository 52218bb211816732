"""Every spec of Megatron's holds our class while it is installed, whatever was imported before."""

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.core.models.hybrid.hybrid_layer_specs as hybrid  # a spec that is made at import
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.bert.bert_layer_specs import get_bert_layer_with_transformer_engine_spec
from megatron.core.models.gpt import gpt_layer_specs as gpt
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.llava_spec import decoder_model_with_transformer_engine_default_spec
from megatron.core.models.T5 import t5_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
from megatron.core.transformer.multi_latent_attention import MLATransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from charm_megatron.config import CharmConfig
from charm_megatron.errors import CharmError, InvalidInput
from charm_megatron.executor import AttentionRuntime
from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.install import Installed, charm_attention_installed
from charm_megatron.mcore.references import find_holders, holders_in_spec
from charm_megatron.mcore.spec import with_charm
from tests.ranks import run_ranks
from tests.te.layers import Stock, Values, config_of, constructible

pytestmark = pytest.mark.te

gpt_layer = gpt.get_gpt_layer_with_transformer_engine_spec

SPECS: dict[str, Callable[[], Any]] = {
    "dense": gpt_layer,
    "moe": lambda: gpt_layer(num_experts=4, moe_grouped_gemm=True),
    "mla": lambda: gpt_layer(multi_latent_attention=True),
    "moe block": lambda: gpt.get_gpt_decoder_layer_specs(
        config_of(1, num_moe_experts=4, add_bias_linear=False), use_transformer_engine=True
    ),
    "hybrid": lambda: hybrid.hybrid_stack_spec,
    "t5 encoder": lambda: t5_spec.encoder_model_with_transformer_engine_default_spec(),
    "t5 decoder": lambda: t5_spec.decoder_model_with_transformer_engine_default_spec(),
    "llava": decoder_model_with_transformer_engine_default_spec,
    "vit": get_vit_layer_with_transformer_engine_spec,
    "bert": get_bert_layer_with_transformer_engine_spec,
}


def attention() -> SplitAttention:
    return SplitAttention(AttentionRuntime(CharmConfig()))


@pytest.fixture
def installed() -> Iterator[Installed]:
    with charm_attention_installed(attention()) as classes:
        yield classes


def places(cls: type[Any], spec: Any) -> list[str]:
    """Where a spec holds `cls`."""
    return [holder.where for holder in holders_in_spec([spec], "spec", cls, set())]


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_holds_our_class(installed: Installed, name: str) -> None:
    assert installed.te is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, of what it builds
        spec = SPECS[name]()
    assert places(Stock.cls, spec) == []
    assert places(installed.te, spec) != []


def test_everything_is_as_before_afterwards() -> None:
    before = sorted(holder.where for holder in find_holders(Stock.cls))
    init = Stock.cls.__init__
    with charm_attention_installed(attention()) as installed:
        assert te.TEDotProductAttention is installed.te
        assert not [holder for holder in find_holders(Stock.cls) if "tests." not in holder.where]
    assert sorted(holder.where for holder in find_holders(Stock.cls)) == before
    assert Stock.cls.__init__ is init


def test_a_spec_that_cannot_be_changed_is_named() -> None:
    module = ModuleType("spec_of_a_user")
    module.spec = ModuleSpec(module=object, submodules=("attention", Stock.cls))  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        with (
            pytest.raises(CharmError, match=r"cannot be replaced in spec_of_a_user.spec.submodules\[1\]"),
            charm_attention_installed(attention()),
        ):
            pass
    finally:
        del sys.modules[module.__name__]


def test_a_layer_of_the_stock_class_is_refused(installed: Installed) -> None:
    """Whoever kept the class where nobody looks, such as in a default argument."""
    arguments = {"layer_number": 1, "attn_mask_type": None, "attention_type": "self"}
    (stock,) = installed.te.__bases__  # type: ignore[union-attr]
    with pytest.raises(
        InvalidInput, match=r"is built from .*TEDotProductAttention, not from charm_megatron's"
    ):
        stock(config_of(2), cp_comm_type="charm", **arguments)


MODELS: dict[str, Values] = {
    "dense": {},
    "moe": {"num_moe_experts": 2, "add_bias_linear": False},
    "mla": {
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "rope_type": "rope",
    },
    "mtp": {"mtp_num_layers": 1},
}


def classes_in_models(rank: int, cp_size: int) -> dict[str, list[tuple[bool, bool]]]:
    """For each attention layer of each model: whether it is of our class, and acts."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    warnings.simplefilter("ignore")  # Megatron's own, of what it builds
    with charm_attention_installed(attention()) as installed:
        return {
            name: [
                (type(module) is installed.te, module.charm_is_on)
                for module in build_model(name, changes).modules()
                if isinstance(module, Stock.cls)
            ]
            for name, changes in MODELS.items()
        }


def build_model(name: str, changes: Values) -> torch.nn.Module:
    kind: Any = MLATransformerConfig if name == "mla" else TransformerConfig
    base = {key: value for key, value in vars(config_of(2)).items() if key in SIZES}
    config = kind(**{**base, "cuda_graph_modules": [], "use_cpu_initialization": True, **changes})
    spec = gpt_layer(config.num_moe_experts, multi_latent_attention=name == "mla")
    mtp = gpt.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True) if name == "mtp" else None
    with constructible():
        return GPTModel(config, spec, 64, 32, position_embedding_type="none", mtp_block_spec=mtp)


SIZES = ("num_layers", "hidden_size", "num_attention_heads", "context_parallel_size", "cp_comm_type")


def test_built_models_have_our_class_in_every_layer() -> None:
    for found in run_ranks(classes_in_models, 2):
        assert set(found) == set(MODELS)
        for name, layers in found.items():
            assert layers == [(True, True)] * (3 if name == "mtp" else 2), name


def test_with_charm_keeps_the_signature_and_installs_first() -> None:
    """As Megatron-Bridge calls it: with vp_stage where the signature has that."""

    def spec_of(config: Any, vp_stage: int | None = None) -> Any:
        return gpt_layer()

    assert inspect.signature(with_charm(spec_of)) == inspect.signature(spec_of)


def specs_by_the_callables(rank: int, num_ranks: int) -> list[bool]:
    from charm_megatron.mcore.spec import layer_spec

    stock = te.TEDotProductAttention
    specs = [with_charm(gpt_layer)()]
    config = type("Config", (), {"transformer": config_of(1), "restore_modelopt_state": False})()
    config.use_transformer_engine_op_fuser = False
    specs.append(layer_spec(config, vp_stage=None))
    ours = te.TEDotProductAttention
    held = [spec.submodules.self_attention.submodules.core_attention for spec in specs]
    return [issubclass(ours, stock), ours is not stock, *(cls is ours for cls in held)]


def test_the_callables_give_specs_with_our_class() -> None:
    """In a process of its own: they install for good."""
    assert run_ranks(specs_by_the_callables, 1) == [[True] * 4]


SCRIPT = """
import megatron.training
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from charm_megatron.mcore.references import find_holders

(stock,) = TEDotProductAttention.__bases__
print(TEDotProductAttention.__name__, [h.where for h in find_holders(stock) if h.where != "__main__.stock"])
print(sum(h.where.startswith("megatron.") for h in find_holders(TEDotProductAttention)) > 6)
"""


def test_a_launched_script_finds_our_class_wherever_it_imports_it(tmp_path: Path) -> None:
    """In a fresh interpreter: here Megatron is imported after the installation."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "charm_megatron.launch", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "charm-megatron: --cp-comm-type charm is installed, in TEDotProductAttention",
        "CharmTEDotProductAttention []",
        "True",
    ]
