"""torch's stores: documented names that its annotations do not export."""

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

__all__ = ["FileStore", "PrefixStore", "Store"]
