"""A session whose replica has met the others, which may be lost and found again, and lets others join."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any

from diloco.algorithm import local_shard, trainable_parameters
from diloco.errors import ConfigurationError, EjectedError, RendezvousError, RunFinishedError, TransportError
from diloco.events import Lost, ViewChanged
from diloco.membership import Cause, NextView, names_of
from diloco.outer import DiLoCo
from diloco.signals import StopAsked, StopRequest
from diloco.train.fleet import MetFleet
from diloco.train.pace import DynamicSteps
from diloco.train.replica import Replica
from diloco.train.session import Session
from diloco.units import format_duration
from diloco.waiting import waiting_for

_RETRY_S = 1.0

OVER = "the others, which have finished"
"""What stops a replica that rejoins a run which has ended."""


class MetSession(Session):
    """The session of one rank of one replica. Members may come and go, and each keeps its part of the data's order."""

    fleet: MetFleet

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.settings.network.straggler == "dynamic":
            self.pace = DynamicSteps(self.replica.number, self.settings.sync.inner_steps, self.fleet)

    @property
    def replica(self) -> Replica:
        """The only replica."""
        return self.replicas[0]

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the run; of a swarm, the most that have trained at once."""
        if not self.fleet.elastic:
            return super().num_replicas
        return self.totals.most_members or self.fleet.num_members

    @property
    def may_lose_others(self) -> bool:
        return self.fleet.rejoins

    # Others that join.

    def open_to_joiners(self) -> None:
        self._tell_progress()
        why, steps = "", self.settings.train.data_parallel_steps
        if self.averages_gradients and self.settings.algorithm == "data-parallel":
            why = "the replicas average gradients at every step, and only DiLoCo and Streaming DiLoCo can be joined"
        elif self.averages_gradients:
            spent_s, left = self.totals.compute_s + self.totals.exchange_s, steps - self.totals.steps
            about = f", in about {format_duration(left * spent_s / self.totals.steps)}" if self.totals.steps else ""
            why = f"the replicas are in their shared start; others join after step {steps}{about}"
        self.fleet.close_to_joiners(why, for_good=self.settings.algorithm == "data-parallel")

    def begin_diloco(self, replica: Replica) -> DiLoCo:
        begins = replica.diloco is None
        diloco = super().begin_diloco(replica)
        if begins:
            self.fleet.close_to_joiners("")
        return diloco

    def _divide_data(self) -> None:
        if self.settings.data.local:
            return
        for assignment in self.fleet.take_assignments():
            self.replica.sampler.assign(assignment)

    def _count_step(self, members: int) -> None:
        super()._count_step(members)
        self._tell_progress()

    def _tell_progress(self) -> None:
        """Note what a replica that joins is told of the steps so far."""
        self.fleet.counted = self.totals.steps, self.totals.sequences + self.totals.missed_sequences

    def agree_on_weights(self) -> None:
        """Go on with the weights of the first replica if any has others.

        A swarm does so only in its shared start, in which nobody joins: it then knows who takes part.
        """
        if self.fleet.elastic and not (self.fleet.begun and self.averages_gradients):
            return
        try:
            super().agree_on_weights()
        except TransportError:
            if not self.fleet.rejoins:
                raise
            # the loss is reported at the next step

    # This replica joins, loses the others, and rejoins them.

    def join(self) -> None:
        """Adopt what the other replicas have while they keep training, and become a member with a fresh inner
        optimizer."""
        self.fleet.close_to_joiners("")
        if self.settings.algorithm not in ("streaming", "diloco"):
            raise ConfigurationError(
                f"Replica {self.replica.number} can't join a run of algorithm={self.settings.algorithm!r} that is "
                "already training; only DiLoCo and Streaming DiLoCo can be joined. Restart all replicas."
            )
        # in a swarm that is about to begin with a shared start, nobody has a state yet
        if not self.fleet.elastic or self.fleet.directory.step > 0 or self.replica.diloco is not None:
            self._adopt_state()
        self._become_member()

    def follow_views(self, stop: StopRequest) -> None:
        """Report the view changes since the last step, and rejoin the others if this replica has lost them.

        A replica that was asked to stop does not search for the others, nor does one that ends with the loss.
        """
        for finding in self.fleet.take_findings():
            self._note(finding)
        if not self.fleet.rejoins:
            return
        for news, reason, cause in self.fleet.take_news():
            self._report_view(news, reason, cause)
        failure = self.fleet.failure()
        if failure is None or stop.signal is not None:
            return
        self._emit(Lost(step=0, reason=str(failure)))
        try:
            self._rejoin_in_the_end(stop)
        except StopAsked:
            return
        except RunFinishedError as error:
            self._note(f"{error} The work that this replica has not shared is in its checkpoint.")
            stop.ask(OVER)
            return
        self._note("This replica has rejoined the others.")

    def _report_view(self, news: NextView, reason: str, cause: Cause) -> None:
        now = news.view.members if news.view else ()
        left = set(news.previous.members) - set(now)
        self._emit(
            ViewChanged(
                step=0,
                replica=self.fleet.transport.replica,
                view=news.view.id if news.view else news.previous.id,
                members=now,
                joined=news.joined,
                left=tuple(sorted(left)),
                lost=tuple(sorted(left.difference(news.left))),
                reason=reason,
                cause=cause,
                names=self.fleet.transport.names(),
            )
        )
        if left and self.settings.data.local:
            self._note(self._share_lost(left))

    def _share_lost(self, left: Collection[int]) -> str:
        """Return a sentence on the data that nobody else has, of replicas that have left."""
        tokens = {replica: site.tokens for replica, site in self.fleet.transport.sites().items()}
        gone = sum(tokens.get(replica, 0) for replica in left)
        share = f", {100 * gone / sum(tokens.values()):.0f} % of the tokens trained so far" if gone else ""
        return f"Nobody else has the data of {names_of(sorted(left))}{share}: the run goes on without it."

    def _rejoin_in_the_end(self, stop: StopRequest) -> None:
        """Rejoin the others, however often that fails; raise `StopAsked` on a request to stop."""
        # a process that is replaced isn't told that the run has ended: the others know only the new process
        replaced = self.fleet.directory.transport.views.replaced
        patience_s = self.settings.network.start_timeout_s if replaced else math.inf
        while True:
            try:
                return self._rejoin(stop, patience_s)
            except (RunFinishedError, EjectedError):
                raise
            except TransportError as error:
                if replaced:
                    me = self.fleet.transport.replica
                    raise RendezvousError(f"Another process has taken the place of replica {me}: {error}") from error
                self._note(f"Rejoining failed and is tried again: {error}")
            with stop.interrupting():
                time.sleep(_RETRY_S)

    def _rejoin(self, stop: StopRequest, patience_s: float) -> None:
        """Rejoin the other replicas after losing them: adopt their state and keep the work that is not shared yet.

        During the shared start there is no state to adopt yet: a replica that finds the others waits for its end. After
        a `TransportError` the call may be repeated.
        """
        replica, fleet = self.replica, self.fleet
        if replica.diloco is not None:
            # rounds in flight fail, and their work stays in the local parameters
            replica.diloco.drain(take_over=False)
        with stop.interrupting():
            fleet.rejoin(patience_s)
        replica.gradients.transport = fleet.transport
        if replica.diloco is not None:
            replica.diloco.change_transport(fleet.transport)
        self.open_to_joiners()
        if replica.diloco is not None:
            replica.diloco.take_over(fleet.transport.view.members, keep_work=True)
        else:
            self._adopt_first_state(stop)
        self._become_member()

    def _adopt_first_state(self, stop: StopRequest) -> None:
        """Adopt the state at the end of the shared start; if that fails, stay in it with none of the others' values."""
        shards = [local_shard(parameter) for parameter in trainable_parameters(self.replica.model).values()]
        before = [shard.clone() for shard in shards]
        try:
            with stop.interrupting():
                self._adopt_state()
        except BaseException:
            self.replica.diloco = None
            for shard, values in zip(shards, before, strict=True):
                shard.copy_(values)
            raise

    def _adopt_state(self) -> None:
        """Adopt the state of the others. Wait while they are connected but have none yet, because they have just
        started or still average gradients at every step."""
        diloco, why, transport = self.begin_diloco(self.replica), "", self.fleet.directory.transport
        with waiting_for(lambda: f"a state to adopt ({why or 'the other replicas are sending it'})", math.inf):
            while True:
                try:
                    return diloco.take_over(self.fleet.transport.view.members)
                except TransportError as error:
                    why = str(error).partition(". ")[0]
                    connected = {*map(transport.rules.replica_of, transport.connections.connected)}
                    if connected <= {transport.replica}:
                        raise
                time.sleep(_RETRY_S)

    def _become_member(self) -> None:
        totals, timeout_s, diloco = self.totals, self.settings.network.join_timeout_s, self.replica.diloco
        before = totals.steps
        with waiting_for(lambda: "the other replicas to admit this one", timeout_s):
            totals.steps = self.fleet.join(timeout_s)
        totals.missed_steps += totals.steps - before
        totals.joined_at = totals.steps
        steps, sequences = self.fleet.counted  # those of the member that has admitted this replica
        since = max(0, totals.steps - steps) * (self.fleet.num_members - 1) * self.settings.train.batch_size
        totals.missed_sequences = max(0, sequences + since - totals.sequences)
        if diloco is not None:
            shared_start = min(self.settings.train.data_parallel_steps, diloco.recovery.begun_after)
            diloco.steps = totals.steps - shared_start
        if not self.settings.data.local:  # else it goes on where it is
            self.replica.sampler.join_at(totals.steps)
