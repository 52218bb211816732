"""The stand-in for CUDA replaces what exists in the installed Megatron, and nothing where CUDA exists."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.megatron

# In a process of its own: importing megatron.training takes seconds and prints warnings.
PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch
import megatron.training.training
from charm_megatron.mcore.compat import COMPILE_HELPERS, OPTIMIZER_LOAD, OPTIMIZER_STATE
from charm_megatron.mcore.install import LOCAL_CORE_ATTENTION
from charm_megatron.mcore.monkeypatch import MissingTarget, resolve
from charm_megatron.train import device, metrics

targets = [patch.target for patch in device.PATCHES]
targets += [metrics.TRAIN_STEP, metrics.TRAINING_LOG, metrics.EVALUATE, metrics.EVALUATE_AND_PRINT]
for target in [*targets, COMPILE_HELPERS, OPTIMIZER_STATE, OPTIMIZER_LOAD, LOCAL_CORE_ATTENTION]:
    resolve(target)
    print(target)
try:
    resolve("megatron.training.training:no_such_function")
    raise SystemExit("a missing target was not noticed")
except MissingTarget:
    pass

def state():
    return [getattr(*resolve(target)) for target in targets]

before = state()
with device.stand_in_for_cuda():
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.zeros(1).cuda().type() == "torch.cuda.FloatTensor"
    assert torch.cuda.current_device() == torch.device("cpu")
assert state() == before
torch.cuda.is_available = lambda: True
with device.stand_in_for_cuda():
    assert state() == before
"""

TARGETS = [
    "torch.cuda:current_device",
    "torch.cuda:synchronize",
    "torch.cuda:Stream",
    "torch.cuda:current_stream",
    "torch.cuda:stream",
    "torch.cuda:manual_seed",
    "torch.cuda:get_rng_state",
    "torch.cuda.random:get_rng_state",
    "torch.cuda:set_rng_state",
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
    "megatron.training.arguments:get_device_arch_version",
    "megatron.training.training:initialize_megatron",
    "megatron.training.training:set_jit_fusion_options",
    "megatron.training.training:train_step",
    "megatron.training.training:training_log",
    "megatron.training.training:evaluate",
    "megatron.training.training:evaluate_and_print_results",
    "megatron.core.datasets.utils:compile_helpers",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
    "megatron.core.models.backends:LocalSpecProvider.core_attention",
]


def test_every_replaced_name_exists_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == TARGETS
