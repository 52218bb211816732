"""What kernels call on a GPU, by operators that compute shapes only: arguments, dtypes, widths, windows."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from charm_megatron.kernels import TorchCudaKernel, TorchCudnnKernel, TorchFlash3Kernel
from charm_megatron.workload import Band

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]
SCALE = 0.27


class Calls(TorchDispatchMode):
    """Keeps what attention operators are called with, by the names of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            arguments = func._schema.arguments
            given = dict(zip([argument.name for argument in arguments], args, strict=False))
            defaults = {argument.name: argument.default_value for argument in arguments}
            self.kept.append({**defaults, **given, **(kwargs or {})})
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls() -> Iterator[Calls]:
    with FakeTensorMode(), Calls() as calls:
        yield calls


def operands(d: int, d_v: int, s_q: int = 40, s_k: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout on a GPU that is not there; k and v lie side by side."""
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    payload = torch.empty(s_k, 2, 4, d + d_v, **options)
    dout = torch.empty(s_q, 2, 8, d_v, **options)
    return torch.empty(s_q, 2, 8, d, **options), payload[..., :d], payload[..., d:], dout


@pytest.mark.parametrize("band", [None, Band(-20, 30)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "widths", "padded"),
    [
        (TorchCudaKernel(), (64, 64), (64, 64)),
        (TorchCudaKernel(), (192, 128), (192, 192)),
        (TorchFlash3Kernel(), (64, 64), (64, 64)),
        (TorchFlash3Kernel(), (192, 128), (192, 128)),
        (TorchFlash3Kernel(), (192, 64), (192, 128)),
        (TorchFlash3Kernel(), (96, 64), (96, 96)),
        (TorchCudnnKernel(), (64, 64), (64, 64)),
        (TorchCudnnKernel(), (100, 36), (104, 40)),
        (TorchCudnnKernel(), (192, 128), (192, 128)),
    ],
    ids=lambda x: type(x).__name__ if hasattr(x, "name") else None,
)
def test_operators_get_the_widths_and_windows_they_take(
    calls: Calls, kernel, widths: tuple[int, int], padded: tuple[int, int], band: Band | None
) -> None:
    q, k, v, dout = operands(*widths)
    is_cudnn = isinstance(kernel, TorchCudnnKernel)
    if is_cudnn and band is not None:
        with pytest.raises(AssertionError, match="no windows"):
            kernel.forward(q, k, v, causal=False, softmax_scale=SCALE, band=band)
        return
    how = {"causal": False, "softmax_scale": SCALE, "band": band}
    out, lse = kernel.forward(q, k, v, **how)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        (dout.shape, torch.bfloat16, (40, 2, 8), torch.float32)
    )
    gradients = kernel.backward(dout, q, k, v, torch.empty_like(dout), lse, **how)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, torch.bfloat16) for x in (q, k, v)]
    rows = 2 if is_cudnn else 1
    for call in calls.kept:
        assert [call[name].shape[3] for name in ("query", "key", "value")] == [
            padded[0],
            padded[0],
            padded[1],
        ]
        assert (call["query"].shape[rows], call["key"].shape[rows]) == (40, 30)
        assert (call["is_causal"], call["scale"]) == (False, SCALE)
        reach = (call.get("window_size_left"), call.get("window_size_right"))
        # Row i sees the keys i - 10 - left .. i - 10 + right: those with -20 <= i - key <= 30.
        assert reach == ((None, None) if band is None else (20, 30))
    forward, backward = calls.kept
    assert backward["logsumexp"].is_contiguous()
    assert backward["logsumexp"].shape == ((2, 8, 40, 1) if is_cudnn else (2, 8, 40))
    assert backward["grad_out"].shape[3] == backward["out"].shape[3] == padded[1]
    assert forward["dropout_p"] == backward["dropout_p"] == 0.0


def test_cudnn_is_not_asked_for_a_block_of_one_key(calls: Calls) -> None:
    q, k, v, dout = operands(64, 64, s_k=1)
    out, lse = TorchCudnnKernel().forward(q, k, v, causal=False, softmax_scale=SCALE)
    gradients = TorchCudnnKernel().backward(dout, q, k, v, out, lse, causal=False, softmax_scale=SCALE)
    assert not calls.kept
    assert {x.dtype for x in (out, *gradients)} == {torch.bfloat16}


@pytest.mark.skipif(
    importlib.util.find_spec("torch.nn.attention._fa3") is None, reason="torch has no FlashAttention 3"
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_hands_on_window_margin_and_determinism_to_flash_attention_3(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    from torch.nn.attention import _fa3

    q, k, v, dout = operands(192, 128)
    handed: list[tuple[object, ...]] = []

    def flash_3_forward(*args: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        handed.append(args)
        out, lse = q.new_empty(2, 40, 8, 128), q.new_empty(2, 8, 40, dtype=torch.float32)
        return out, lse, lse, lse

    def flash_3_backward(*args: object) -> None:
        handed.append(args)

    def attend(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
        return _fa3._fa3_flash_attention_forward_impl(*args, **kwargs)

    def gradients(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
        return _fa3._fa3_flash_attention_backward_impl(*args, **kwargs)

    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", flash_3_forward)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", flash_3_backward)
    monkeypatch.setattr(_fa3, "_get_device_major", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", gradients)
    kernel, how = TorchFlash3Kernel(8), {"causal": False, "softmax_scale": SCALE, "band": Band(-20, 30)}
    torch.use_deterministic_algorithms(deterministic)
    try:
        out, lse = kernel.forward(q, k, v, **how)
        result = kernel.backward(dout, q, k, v, out, lse, **how)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [x.shape for x in (out, lse, *result)] == [dout.shape, (40, 2, 8), q.shape, k.shape, v.shape]
    forward, backward = handed
    assert [x.shape for x in forward[:3]] == [(2, 40, 8, 192), (2, 30, 4, 192), (2, 30, 4, 128)]
    # hopper/flash_attn_interface.py: softmax_scale, causal, left, right; at the end sm_margin.
    assert forward[23:27] == backward[15:19] == (SCALE, False, 20, 30)
    assert (forward[-1], backward[-1]) == (8, 8)
    assert backward[20] is deterministic
