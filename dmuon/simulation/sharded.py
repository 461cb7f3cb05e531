"""One step of the exchanged residency: FSDP2 moves all weights, and ``step()`` brings pieces to owners and back."""

from __future__ import annotations

from collections import deque

from dmuon.simulation.engine import COMPUTE, Simulation, Times
from dmuon.simulation.exchange import Load, RoundLoad, schedule
from dmuon.simulation.fsdp import AdamW
from dmuon.simulation.network import Ring
from dmuon.simulation.scenario import MASTER_BYTES, Scenario, tensors
from dmuon.step.rounds import prefetch_windows

_PREFETCH = 1  # as create_dtensor_config's default
_FOLD_BYTES = 3 * MASTER_BYTES  # of an element: its gradient and its momentum read, this written
_READ_BYTES = 2 * MASTER_BYTES  # both read again
_NORM_BYTES = 8  # of a matrix: the sum of its squares


class Exchanged(AdamW):
    """Rounds of batches: while one is orthogonalized, the next one is gathered and the last one scattered.

    With replicas, the one before that goes on to them meanwhile. Where Newton–Schulz is in half precision, gradients
    are folded into momentum before the first round and norms of whole matrices added up, so that parts travel as it
    takes them.
    """

    def __init__(self, sim: Simulation, scenario: Scenario) -> None:
        super().__init__(sim, scenario)
        self._schedule = schedule(scenario)

    def host_s(self) -> float:
        terms = self.machine.terms
        return super().host_s() + terms.host_exchanged_s * tensors(self.scenario.plan.matrices)

    def update(self) -> None:
        rounds = self._schedule.rounds
        windows = prefetch_windows([0] * len(rounds), _PREFETCH)
        gathered: dict[int, Times] = {}
        scattered: deque[tuple[RoundLoad, Times]] = deque()
        arriving: deque[tuple[RoundLoad, Times]] = deque()
        half = self.machine.ns_bytes < MASTER_BYTES
        halved = [turn for turn, round_ in enumerate(rounds) if half and round_.gather.messages]

        def start(turns: range | list[int]) -> None:
            for turn in turns:
                if turn not in gathered:
                    if turn in halved:
                        nbytes = _READ_BYTES + 2 * self.machine.ns_bytes
                    else:
                        nbytes = _FOLD_BYTES + 2 * MASTER_BYTES
                    self._elementwise("momentum", rounds[turn], nbytes)
                    gathered[turn] = self._send("gather", rounds[turn].gather)

        def finish() -> None:
            while arriving:
                round_, arrived = arriving.popleft()
                self.sim.wait(COMPUTE, arrived)
                self._elementwise("apply", round_, self.machine.ns_bytes + 2 * MASTER_BYTES)

        def forward() -> None:
            while scattered:
                round_, arrived = scattered.popleft()
                self.sim.wait(COMPUTE, arrived)
                way = self.way("broadcast", "replicate", *round_.copied)
                arriving.append((round_, self.travel("copies", "copies", "replicate", way, self.sim.now(COMPUTE))))

        if halved:
            self._join_norms([rounds[turn] for turn in halved])
        if self._schedule.alone.any():
            start(range(min(_PREFETCH, len(rounds))))
            self.sim.compute("ns", self._schedule.alone)
        for turn, round_ in enumerate(rounds):
            start(windows[turn])
            self.sim.wait(COMPUTE, gathered[turn])
            self.sim.compute("ns", round_.ns)
            leaving = round_, self._send("scatter", round_.scatter)
            finish()
            forward()
            (scattered if round_.copied[1] else arriving).append(leaving)
            if round_.copied[1] and not round_.scatter.messages:
                forward()
        forward()
        self._adamw(self.others())
        finish()

    def _join_norms(self, rounds: list[RoundLoad]) -> None:
        for round_ in rounds:
            self._elementwise("momentum", round_, _FOLD_BYTES)
        way = self.way("all_reduce", "all", _NORM_BYTES * self._schedule.matrices)
        self.sim.wait(COMPUTE, self.travel("exchange", "norms", "all", way, self.sim.now(COMPUTE)))

    def _elementwise(self, name: str, round_: RoundLoad, nbytes: int) -> None:
        self.sim.compute(name, round_.parts * (nbytes / self.machine.copy_bytes_per_s))

    def _send(self, name: str, load: Load) -> Times:
        """An all-to-all; what stays in a node and what leaves it are on their way at once."""
        network, ring = self.machine.network, self.rings["all"]
        near = network.travel("all_to_all", Ring(ring.size, 1), load.near, load.messages)
        far = network.travel("all_to_all", ring, load.far, load.messages)
        if not load.messages:
            return self.sim.now(COMPUTE)
        slower = far if load.far and far.seconds > near.seconds else near
        link = f"{ring.link if load.far else 'intra'} link"
        return self.sim.run(
            self.beside(("exchange",)),
            name,
            slower.seconds,
            links={link: slower.busy},
            after=(self.sim.now(COMPUTE),),
            groups=self.groups["all"],
            contends=True,
        )
