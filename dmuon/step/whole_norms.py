"""Norms of matrices that are cut: what the parts on every rank add to them, joined before any part travels.

Where Newton–Schulz begins in half precision, parts are divided by them and travel as it takes them, which is half the
bytes of momentum. Each rank rounds what the owner would round otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.layout.parcels import Parcel


class WholeNorms:
    """Of the matrices of one round, which are right when they were joined.

    Args:
        parcels: of the round's batches.
        norms: by number of the batch, fp64 ``(count,)``, of this rank's parts. Of copies the owner's one counts.
        device: of the norms, also where this rank has none.
    """

    def __init__(
        self, parcels: Sequence[Parcel], domain: Domain, norms: Mapping[int, Tensor], device: torch.device
    ) -> None:
        self.domain = domain
        self.counts = [parcel.count for parcel in parcels]
        self.squares = torch.zeros(sum(self.counts), dtype=torch.float64, device=device)
        slots = self.squares.split(self.counts)
        counted = [i for i in norms if domain.position in parcels[i].to_owner.senders]
        if counted:
            torch._foreach_copy_([slots[i] for i in counted], [norms[i] for i in counted])
            self.squares.square_()

    def of_batches(self) -> list[Tensor]:
        """By number of the batch, fp64 ``(count,)``."""
        return list(self.squares.sqrt().split(self.counts))


def join(norms: Sequence[WholeNorms]) -> None:
    """Sum squares over the ranks of each domain. Collective, one all-reduce a domain, in the order of ``norms``."""
    by_domain: dict[int, list[WholeNorms]] = {}
    for one in norms:
        by_domain.setdefault(id(one.domain), []).append(one)
    pending = []
    for members in by_domain.values():
        domain, sums = members[0].domain, torch.cat([one.squares for one in members])

        def launch(sums: Tensor = sums, group: dist.ProcessGroup = domain.group) -> list[dist.Work | None]:
            return [dist.all_reduce(sums, group=group, async_op=True)]

        what = f"norms of {len(sums)} matrices"
        pending.append((domain.monitor.start(domain.lane, what, launch), members, sums))
    for work, members, sums in pending:
        work.wait()
        for one, squares in zip(members, sums.split([len(one.squares) for one in members]), strict=True):
            one.squares = squares
