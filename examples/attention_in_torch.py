"""A small model in plain torch, its sequence split over ranks: trained as on one rank, loss for loss.

    torchrun --nproc-per-node 4 examples/attention_in_torch.py

Three things change against a model on one rank: tokens and positions are those of the rank's shard, attention goes
through `context_parallel_attention`, and gradients are added up over the ranks. Rank 0 also trains the whole sequence
by itself and prints both losses; they differ by rounding. Runs on CPUs over gloo, with a GPU per rank over NCCL.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import charm_megatron as cm

SEQ_LEN, VOCABULARY, WIDTH, HEADS, STEPS = 64, 29, 32, 4, 8


class Model(nn.Module):
    """One layer of causal attention with rotary embedding. `group` None: the whole sequence is here."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.embed, self.readout = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [s] -> logits [s, vocabulary]."""
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(len(tokens), 1, HEADS, 3, -1).unbind(3)  # each [s, b, h, d]
        q, k = rotated(q, positions), rotated(k, positions)
        if self.group is None:
            heads_first = [y.permute(1, 2, 0, 3) for y in (q, k, v)]
            attended = scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3)
        else:
            attended = cm.context_parallel_attention(q, k, v, group=self.group, mask="causal", domains=2)
        return self.readout(x + self.out(attended.flatten(1)))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [s, b, h, d]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 1e4 ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    return torch.cat(
        [x[..., :half] * cos - x[..., half:] * sin, x[..., :half] * sin + x[..., half:] * cos], -1
    )


def train(tokens: Tensor, targets: Tensor, positions: Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """The loss of each step, a mean over the whole sequence."""
    torch.manual_seed(0)
    model = Model(group).to(tokens.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = cross_entropy(model(tokens, positions), targets, reduction="sum") / SEQ_LEN
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:  # each rank has the part of its tokens
            for x in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(x, group=group)
        optimizer.step()
        losses.append(float(total))
    return losses


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, device = dist.get_rank(), "cpu"
    if cuda:
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    group = dist.new_group()
    text = torch.randint(VOCABULARY, (SEQ_LEN + 1,), generator=torch.Generator().manual_seed(0)).to(device)
    tokens, targets = text[:-1], text[1:]
    split = train(
        cm.shard(tokens, group=group),
        cm.shard(targets, group=group),
        cm.positions(SEQ_LEN, group=group, device=device),
        group,
    )
    if rank == 0:
        whole = train(tokens, targets, torch.arange(SEQ_LEN, device=device), None)
        print(f"step  one rank  {dist.get_world_size()} ranks")
        for step, losses in enumerate(zip(whole, split, strict=True), start=1):
            print(f"{step:4}  {losses[0]:8.5f}  {losses[1]:7.5f}")
        worst = max(abs(a - b) for a, b in zip(whole, split, strict=True))
        print(f"largest difference: {worst:.1e}")
        assert worst < (1e-2 if cuda else 1e-4), "the split model has to learn what the whole one learns"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
