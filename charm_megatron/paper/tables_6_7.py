"""Tables 6 and 7 of the CHARM+ paper (arXiv:2611.05906): milliseconds of a training iteration on 16 GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Iteration:
    """One row on one kind of GPU. `config` and `variant` name the configuration of this repository for it."""

    table: int
    gpu: str
    config: str
    batch: int
    seq_len: int
    ring_ms: float
    charm_ms: float

    @property
    def variant(self) -> str:
        return f"table_{self.table}_{self.batch}x{self.seq_len}"


ITERATIONS = (
    Iteration(6, "L20", "gpt_350m", 16, 2048, 10082.6, 4847.0),
    Iteration(6, "L20", "gpt_350m", 8, 4096, 10032.6, 4871.5),
    Iteration(6, "L20", "gpt_350m", 4, 8192, 9914.5, 5173.6),
    Iteration(6, "L20", "gpt_350m", 2, 16384, 10089.5, 5637.3),
    Iteration(6, "L20", "gpt_1_3b", 16, 2048, 21505.5, 11738.3),
    Iteration(6, "L20", "gpt_1_3b", 8, 4096, 22073.7, 11768.1),
    Iteration(6, "L20", "gpt_1_3b", 4, 8192, 21857.8, 12097.5),
    Iteration(6, "L20", "gpt_1_3b", 2, 16384, 22064.5, 12796.6),
    Iteration(7, "H20", "gpt_350m", 16, 16384, 7304.6, 5601.3),
    Iteration(7, "H20", "gpt_350m", 32, 8192, 7193.7, 4669.7),
    Iteration(7, "H20", "gpt_350m", 64, 4096, 7169.6, 4452.5),
    Iteration(7, "H20", "gpt_350m", 128, 2048, 7143.6, 4242.5),
    Iteration(7, "H100", "gpt_350m", 16, 16384, 3385.1, 1925.7),
    Iteration(7, "H100", "gpt_350m", 32, 8192, 3291.5, 1679.2),
    Iteration(7, "H100", "gpt_350m", 64, 4096, 3234.6, 1538.6),
    Iteration(7, "H100", "gpt_350m", 128, 2048, 3210.8, 1482.0),
)
