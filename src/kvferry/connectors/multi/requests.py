"""What the scheduler's role knows of each request: who loads for it, who must not see it, and who
still reads its blocks.

Pure. An engine keeps the blocks of a finished request for one of two reasons: a load still writes
into the blocks, or a connector asked for a delayed free. vLLM frees the blocks at the first report
of either kind. So if both reasons exist, this table joins the two reports into one: the engine is
told of the end of the load when the last child has finished.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.contract import Request, RequestStatus, ScheduledSlice, Step
from kvferry.connectors.multi.lookup import ChildTraits, LoadPlan


@dataclass(slots=True)
class RequestState:
    """One request, from its arrival until no child uses its blocks."""

    request: str
    num_local: int = 0
    """How many tokens the engine itself had when it last asked for a load."""
    plan: LoadPlan = field(default_factory=LoadPlan)
    """The last answer to the engine."""
    admitted: LoadPlan = field(default_factory=LoadPlan)
    """The part of the plan that the engine accepted."""
    waiting_since: dict[int, float] = field(default_factory=dict)
    """Since when each child has had no answer for the engine."""
    loading: set[int] = field(default_factory=set)
    """The children that load between steps and have not reported."""
    is_complete: bool = True
    """False from the start of a load until all of it has arrived: the engine may count tokens as
    computed whose KV is not there.
    """
    awaits_load: bool = False
    """The engine has not gone on with the request since its last load between steps began."""
    failed: set[int] = field(default_factory=set)
    """Children that failed to load for this request."""
    is_barred: bool = False
    """No child is asked any more, because the KV of an earlier load could not be used: the request
    could fail for ever, and vLLM, which keeps the blocks of the first load reserved, may never have
    enough blocks for a second one.
    """
    excluded: set[int] = field(default_factory=set)
    """Children that refused to accept the request; no later call for the request reaches them."""
    dummy_child: int | None = None
    """The child that filled blocks of this request with dummy KV."""
    has_unknown_prefix: bool = False
    """The request began with cached blocks that may hold dummy KV."""
    sending: set[int] = field(default_factory=set)
    """The children that asked the engine to keep the blocks of the finished request."""
    is_finished: bool = False
    is_joined: bool = False
    """The request finished while it was loading: one report ends both the load and the sends."""

    def is_hidden_from(self, child: ChildTraits) -> bool:
        """Whether a child must not learn which blocks hold this request's KV."""
        has_dummy_kv = self.dummy_child is not None or self.has_unknown_prefix
        return (
            child.index in self.excluded
            # The child still knows the blocks that the request had before it started over.
            or (self.is_barred and child.follows_lookups)
            or (has_dummy_kv and child.index != self.dummy_child)
        )

    def depends_on(self, children: Collection[int]) -> bool:
        """Whether only these children have failed to load or, before a failure, have loaded."""
        loaders = self.failed or {part.child for part in self.admitted.ranges}
        return bool(loaders) and loaders.issubset(children)

    def may_load_from(self, child: int) -> bool:
        return not self.is_barred and child not in self.excluded


@dataclass(slots=True)
class FinishedTransfers:
    """The requests whose transfers have ended, for the engine or for one child."""

    recving: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sending: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RequestTable:
    """The requests of one engine."""

    dummies: Collection[int] = ()
    """Children that provide dummy KV."""
    _states: dict[str, RequestState] = field(default_factory=dict, init=False)
    _has_loaded_dummy: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self._states)

    def get(self, request: str) -> RequestState:
        """The state of a request. From now on the request is known."""
        return self._states.setdefault(request, RequestState(request))

    def find(self, request: str) -> RequestState:
        """The state of a request; an empty one, which is not kept, if the request is not known."""
        return self._states.get(request) or RequestState(request)

    def hidden_from(self, child: ChildTraits) -> set[str]:
        return {name for name, state in self._states.items() if state.is_hidden_from(child)}

    @property
    def senders(self) -> set[int]:
        """The children that still read the blocks of a finished request."""
        return {child for state in self._states.values() for child in state.sending}

    def offer(self, request: str, num_local: int, plan: LoadPlan) -> None:
        state = self.get(request)
        state.num_local, state.plan = num_local, plan

    def admit(self, request: str, num_external: int) -> LoadPlan:
        """Record that the engine has allocated blocks and takes `num_external` tokens of the plan;
        the children whose ranges are in the returned plan load them.
        """
        state = self.get(request)
        state.waiting_since.clear()
        accepted, state.plan = state.plan.first(num_external), LoadPlan()
        # The engine calls again, without tokens, after a load between steps.
        if accepted.ranges:
            state.admitted = accepted
        if accepted.is_async:
            state.loading = {part.child for part in accepted.ranges}
        state.is_complete = not state.loading
        state.awaits_load = accepted.is_async
        chosen = [part.child for part in accepted.ranges if part.child in self.dummies]
        if chosen:
            state.dummy_child = chosen[0]
        elif self._has_loaded_dummy and state.num_local:
            # The engine's own prefix cache does not say whose KV its blocks hold.
            state.has_unknown_prefix = True
        self._has_loaded_dummy = self._has_loaded_dummy or bool(chosen)
        return accepted

    def bar_loads(self) -> None:
        """Let the engine compute the requests that are loading or have just loaded."""
        for state in self._states.values():
            state.is_barred = state.is_barred or state.awaits_load

    def note_failed(self, request: str, children: Iterable[int]) -> None:
        state = self.find(request)
        state.failed |= set(children) & (state.loading | state.failed)

    def depending_on(self, children: Collection[int]) -> set[str]:
        """The requests that depend on no other children."""
        return {name for name, state in self._states.items() if state.depends_on(children)}

    def finish(self, request: str, senders: Collection[int]) -> bool:
        """Record that a request has finished; True if the engine must wait for
        `finished_sending`.
        """
        state = self.get(request)
        state.is_finished = True
        state.waiting_since.clear()
        state.sending = set(senders)
        if state.loading:
            # The engine waits for the end of the load anyway, and must not be told of two ends.
            state.is_joined = bool(state.sending)
            return False
        if not state.sending:
            del self._states[request]
        return bool(senders)

    def take_finished(
        self, recving: Iterable[str], sending: Iterable[str]
    ) -> tuple[FinishedTransfers, defaultdict[int, FinishedTransfers]]:
        """Process what the ranks report. Returns what has ended for the engine and each child."""
        engine = FinishedTransfers()
        children: defaultdict[int, FinishedTransfers] = defaultdict(FinishedTransfers)
        for request in recving:
            state = self.find(request)
            if not state.loading:
                engine.recving.add(request)
                continue
            for child in state.loading:
                children[child].recving.add(request)
            for child in state.loading & state.failed:
                children[child].failed.add(request)
                state.is_barred = True
            state.is_complete = state.loading.isdisjoint(state.failed)
            state.loading = set()
            self._end_joined(state, engine)
        for request in sending:
            state = self.find(request)
            if not state.sending:
                engine.sending.add(request)
                continue
            for child in state.sending:
                children[child].sending.add(request)
            state.sending = set()
            if state.is_joined:
                self._end_joined(state, engine)
            else:
                engine.sending.add(request)
                del self._states[request]
        return engine, children

    def _end_joined(self, state: RequestState, engine: FinishedTransfers) -> None:
        """Tell the engine of the end of a load, unless another child still reads the blocks."""
        if state.is_joined and (state.loading or state.sending):
            return
        engine.recving.add(state.request)
        if state.is_finished:
            del self._states[state.request]


# -- what a child is shown --


@dataclass(frozen=True, slots=True)
class LimitedRequest:
    """A request as if it had been aborted after `num_computed_tokens` tokens."""

    request: Request
    num_computed_tokens: int
    status: RequestStatus = RequestStatus.FINISHED_ABORTED

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


@dataclass(frozen=True, slots=True)
class LimitedStep:
    """A step without the slices of some requests."""

    step: Step
    hidden: Collection[str]

    @property
    def slices(self) -> tuple[ScheduledSlice, ...]:
        return tuple(part for part in self.step.slices if part.request_id not in self.hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)
