"""Where ranks come from: processes forked from one that has imported everything, which takes seconds once."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.debug",
        "torch.distributed.tensor.parallel",
        "dmuon",
    ]
)
