"""Serves one client request with a prefill leg on P and a decode leg on D.

The legs run one after the other, or in parallel if P and D are both known to push. Runs on the
event loop. Until the client has received a byte, a failed leg is retried on another instance: a
prefill changes nothing but P's held blocks, and the client has seen no token. When a client
disconnects, the handler is cancelled and the running leg closes the connection to its instance;
the engine then aborts the request. P's blocks are released unless D has taken the blocks over:
after P's answer by its ticket (`PrefilledBlocks`), before by the id of the leg (`PrefillLeg`). See
docs/decisions/035-router.md.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from kvferry.router.conversations.store import LastTurn
from kvferry.router.conversations.turns import TurnTracker
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.fleet.members import RoutingHints
from kvferry.router.fleet.watcher import InstanceWatcher
from kvferry.router.serving.client_request import Handover
from kvferry.router.serving.context import (
    HttpResponse,
    LegFailure,
    RequestContext,
    build_error_response,
)
from kvferry.router.serving.first_token import read_first_token
from kvferry.router.serving.instance_client import NOT_FOUND, UNAVAILABLE, InstanceClient
from kvferry.router.serving.legs import DecodeLeg, FailureQuery, PrefillLeg
from kvferry.router.serving.push import LegFinisher, PushSources, run_both_legs
from kvferry.router.serving.side_channel import BlockReleaser, PrefilledBlocks
from kvferry.types import FailurePolicy

_log = logging.getLogger(__name__)


_SEED_BITS = 31


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """Result of a successful prefill leg."""

    instance: Instance | None
    """None: D computes the prompt."""
    handover: Handover | None


@dataclass(frozen=True, slots=True)
class _ParallelLegs:
    """State shared by a prefill leg and a decode leg that run in parallel."""

    push_handover: Handover
    held: PrefilledBlocks
    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when P has answered."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when D's answer has content for the client."""


@dataclass(slots=True)
class Dispatcher:
    """Chooses P and D for a request, runs both legs, and retries."""

    instance_client: InstanceClient
    releases: BlockReleaser
    push_sources: PushSources
    watcher: InstanceWatcher
    turns: TurnTracker
    leg_finisher: LegFinisher
    ask_failure: FailureQuery | None = None
    """Asks an engine's side channel why a transfer failed; None: errors say what engines answer."""
    prefill: PrefillLeg = field(init=False)
    decode: DecodeLeg = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = PrefillLeg(
            self.instance_client, self.push_sources, self._release_leg, self.ask_failure
        )
        self.decode = DecodeLeg(
            self.instance_client, self.turns, self.leg_finisher, self.ask_failure
        )

    @property
    def fleet(self) -> Fleet:
        return self.instance_client.fleet

    async def serve(self, context: RequestContext) -> None:
        """Serve the request until the client has received the response."""
        last_turn = await self.turns.take(context)
        context.retries_left = self.instance_client.options.routing.max_retries
        while True:
            failure = await self._attempt(context, last_turn)
            if failure is None:
                return
            if (
                context.is_started
                or not failure.needs_prefill
                or not self._may_retry(context, failure)
            ):
                break
            # Use another pair if there is one, else the same pair: P may have restarted and have
            # a new incarnation. The retry runs without the conversation's last turn.
            last_turn = None
        context.error = failure.message
        answer = failure.response()
        # A fleet that is full or gone refuses many requests, and clients ask for models that it
        # does not have: these are counted, not logged.
        if answer.status not in (UNAVAILABLE, NOT_FOUND):
            _log.warning("request failed request=%s: %s", context.request_id, failure.message)
        context.send(answer)

    def _may_retry(self, context: RequestContext, failure: LegFailure) -> bool:
        if failure.is_final or self._is_in_vain(context, failure):
            return False
        if not self._is_free(context, failure):
            if context.retries_left <= 0:
                return False
            context.retries_left -= 1
        if failure.instance is not None:
            self.instance_client.metrics.retries.add(failure.instance.role)
        _log.info("retrying request=%s: %s", context.request_id, failure.message)
        return True

    def _is_in_vain(self, context: RequestContext, failure: LegFailure) -> bool:
        """Whether D refused in a way that costs another prefill, and all other Ds have been tried
        or are in their cooldown: all may be paused then.
        """
        refused = failure.instance if failure.is_refusal and failure.needs_prefill else None
        if refused is None or refused.role is not Role.DECODE:
            return False
        now = time.monotonic()
        return not any(
            member.ready_at <= now and member.instance not in context.tried
            for member in self.fleet.members(Role.DECODE)
        )

    def _is_free(self, context: RequestContext, failure: LegFailure) -> bool:
        """Whether a retry costs none of `max_retries`. The loop still ends, when all instances of
        the fleet have been tried.
        """
        if failure.is_transfer and not failure.is_consequence:
            # D works, and another P may do better. If it does not, the request may be at fault.
            now = time.monotonic()
            return (
                context.num_failed_transfers == 1
                and self.fleet.peek(Role.PREFILL, context.hints, now, context.tried) is not None
            )
        return (
            failure.is_consequence
            or failure.is_lacking
            or (
                (failure.is_unsent or failure.is_refusal)
                and (failure.instance is None or context.tried.count(failure.instance) <= 1)
            )
        )

    async def _attempt(
        self, context: RequestContext, last_turn: LastTurn | None
    ) -> LegFailure | None:
        """Try one P and one D; instances that refuse or are unreachable are replaced."""
        context.hints = hints = RoutingHints(
            context.prompt, last_turn.prefiller if last_turn is not None else None
        )
        prefiller = self._choose(Role.PREFILL, context, hints)
        if prefiller is not None:
            push_handover = self.push_sources.push_handover_for(prefiller)
            if push_handover is not None:
                decoder = await self._choose_pushing(context, _decode_hints(context, last_turn))
                if decoder is not None:
                    return await self._serve_in_parallel(
                        context, (prefiller, decoder), push_handover, last_turn
                    )
        prefilled = await self._prefill_somewhere(context, prefiller, hints, last_turn)
        if isinstance(prefilled, LegFailure):
            return prefilled
        if isinstance(prefilled, HttpResponse):
            context.send(prefilled)
            return None
        context.prefiller = prefilled.instance
        with PrefilledBlocks(self.releases, prefilled.handover) as held:
            if await self._begin_early(context, prefilled.handover, last_turn):
                return None
            return await self._decode_somewhere(context, held, prefilled.handover, last_turn)

    # -- legs one after the other --

    async def _prefill_somewhere(
        self,
        context: RequestContext,
        instance: Instance | None,
        hints: RoutingHints,
        last_turn: LastTurn | None,
    ) -> _Prefilled | HttpResponse | LegFailure:
        """Run the prefill leg on `instance`, and on further instances after a failure."""
        refusal: LegFailure | None = None
        failure: LegFailure | None = None
        while instance is not None:
            params = last_turn.params or None if last_turn is not None else None
            result = await self.prefill.run(context, instance, last_turn=params)
            if isinstance(result, HttpResponse):
                return result
            if not isinstance(result, LegFailure):
                return _Prefilled(instance, result)
            context.note_failure(instance, result)
            if result.is_final:
                return result
            if result.is_refusal:
                refusal = result
            elif not result.is_lacking:
                failure, last_turn = result, None
                if not self._may_retry(context, result):
                    break
            instance = self.fleet.choose(Role.PREFILL, hints, time.monotonic(), context.tried)
        if refusal is not None:
            # The prefill instances are full or draining: D must not take over the refused
            # work.
            return refusal
        if self.instance_client.options.routing.without_prefill is FailurePolicy.RECOMPUTE:
            context.timeline.fallback = (failure or _no_instance(Role.PREFILL, context)).message
            return _Prefilled(None, None)
        return failure or _no_instance(Role.PREFILL, context)

    async def _begin_early(
        self, context: RequestContext, handover: Handover | None, last_turn: LastTurn | None
    ) -> bool:
        """Begin the client's answer with P's token if the answer stays exact; True if the answer
        ends with it.
        """
        first = read_first_token(context.client, handover, seed=random.getrandbits(_SEED_BITS))
        if first is None:
            return False
        is_last = first.continued is None
        hints = _decode_hints(context, last_turn)
        # Without a D the client gets a status and not a stream that breaks off. D retains the turns
        # of a conversation, so D also answers if P's token is the last.
        if (
            context.turn_id is not None
            if is_last
            else self._pick(self.fleet.peek, Role.DECODE, context, hints) is None
        ):
            return False
        await context.begin_with(first)
        self.instance_client.metrics.first_tokens.add()
        if context.facts is not None:
            context.facts.note_first_token()
        if context.has_begun_early or is_last:
            self.instance_client.note_first_token(context.timeline, time.monotonic())
        return is_last

    async def _decode_somewhere(
        self,
        context: RequestContext,
        held: PrefilledBlocks,
        handover: Handover | None,
        last_turn: LastTurn | None,
    ) -> LegFailure | None:
        """Run the decode leg; try further instances while P's blocks can still be used."""
        hints = _decode_hints(context, last_turn)
        failure = refusal = None
        asked: list[Instance] = []
        while (instance := self._choose(Role.DECODE, context, hints, asked)) is not None:
            result = await self.decode.run(context, held, instance, handover)
            if result is None or context.is_started:
                return result
            if result.is_lacking:
                context.note_failure(instance, result)
                continue
            # If the D before this one died after it had fetched P's blocks, P has freed them, and
            # this D finds none: both failures have one cause and cost one retry.
            has_died = failure is not None and not (failure.is_unsent or failure.is_refusal)
            failure = replace(result, is_consequence=has_died and result.needs_prefill)
            context.note_failure(instance, failure)
            asked.append(instance)
            if failure.needs_prefill or not (
                failure.is_refusal or self._may_retry(context, failure)
            ):
                return failure
            refusal = failure if failure.is_refusal else refusal
        if refusal is not None:
            # A client can act on "this D is full, try again later" better than on "that D is down".
            return refusal
        if failure is not None and not failure.is_unsent:
            # The retry was granted, and all Ds have failed with these blocks. A D that could not
            # be reached before may have restarted.
            return replace(failure, needs_prefill=True, is_consequence=True)
        return failure or _no_instance(Role.DECODE, context)

    # -- legs in parallel --

    async def _serve_in_parallel(
        self,
        context: RequestContext,
        pair: tuple[Instance, Instance],
        push_handover: Handover,
        last_turn: LastTurn | None,
    ) -> LegFailure | None:
        prefiller, decoder = pair
        self.instance_client.metrics.in_parallel.add()
        context.prefiller = prefiller
        with PrefilledBlocks(self.releases, None, push_handover) as held:
            parallel = _ParallelLegs(push_handover, held)
            result: HttpResponse | LegFailure | None = await run_both_legs(
                self._prefill_alongside(context, prefiller, parallel, last_turn),
                self._decode_alongside(context, parallel, decoder, last_turn),
                parallel.has_begun.is_set,
                self.leg_finisher.finish_leg,
            )
        if isinstance(result, HttpResponse):
            context.send(result)
            return None
        if result is not None and not result.is_lacking:
            # D could not get P's KV. If P has restarted, P's next answer shows the new incarnation.
            self.push_sources.forget(prefiller)
        return result

    async def _prefill_alongside(
        self,
        context: RequestContext,
        prefiller: Instance,
        parallel: _ParallelLegs,
        last_turn: LastTurn | None,
    ) -> HttpResponse | LegFailure | None:
        """Run the prefill leg beside the decode leg; return P's error or failure, if any."""
        params = last_turn.params or None if last_turn is not None else None
        result = await self.prefill.run(
            context, prefiller, parallel.push_handover.push_ticket, params
        )
        if isinstance(result, HttpResponse):
            return result
        if isinstance(result, LegFailure):
            context.note_failure(prefiller, result)
            return replace(result, needs_prefill=True)
        if result is not None:
            parallel.held.receive(result)
        parallel.held.ready_at = time.monotonic()
        parallel.is_computed.set()
        return None

    async def _decode_alongside(
        self,
        context: RequestContext,
        parallel: _ParallelLegs,
        decoder: Instance,
        last_turn: LastTurn | None,
    ) -> LegFailure | None:
        """Run the decode leg beside the prefill leg.

        A D that pushes is called at once. After a refusal the next D may only support pull: that D
        is called when P has answered, with the ticket from P's answer.
        """
        hints = _decode_hints(context, last_turn)
        failure: LegFailure | None = None
        asked: list[Instance] = []
        instance: Instance | None = decoder
        while instance is not None:
            is_push = await self.watcher.supports_push(instance)
            if not is_push:
                await parallel.is_computed.wait()
            handover = parallel.push_handover if is_push else parallel.held.handover
            result = await self.decode.run(
                context, parallel.held, instance, handover, parallel.has_begun
            )
            if result is None or context.is_started:
                return result
            context.note_failure(instance, result)
            if not result.is_lacking:
                failure = result
                asked.append(instance)
                self.watcher.forget_mode(instance)
                if failure.needs_prefill or not failure.is_refusal:
                    return replace(failure, needs_prefill=True)
            instance = self._choose(Role.DECODE, context, hints, asked)
        return failure or _no_instance(Role.DECODE, context)

    def _release_leg(self, instance: Instance, leg_id: str) -> None:
        side_channel = self.watcher.known_side_channel(instance)
        if side_channel is not None:
            self.releases.release_leg(side_channel, leg_id)

    # -- choice of instances --

    async def _choose_pushing(
        self, context: RequestContext, hints: RoutingHints
    ) -> Instance | None:
        """Choose the next D if D pushes. A D that does not push is only peeked at, not chosen, and
        keeps its place in the order until P has answered.
        """
        next_up = self._pick(self.fleet.peek, Role.DECODE, context, hints)
        if next_up is None or not await self.watcher.supports_push(next_up):
            return None
        return self._choose(Role.DECODE, context, hints)

    def _choose(
        self,
        role: Role,
        context: RequestContext,
        hints: RoutingHints,
        asked: Sequence[Instance] = (),
    ) -> Instance | None:
        """Choose an instance that has not failed this request; if all have, see `_pick`."""
        return self._pick(self.fleet.choose, role, context, hints, asked)

    def _pick(
        self,
        pick: Callable[[Role, RoutingHints, float, Collection[Instance]], Instance | None],
        role: Role,
        context: RequestContext,
        hints: RoutingHints,
        asked: Sequence[Instance] = (),
    ) -> Instance | None:
        """Call `pick` for instances that have not failed this request; if every instance has, for
        those that answered: D may have failed for want of P's blocks. Instances that did not answer
        come last, the latest of them at the very end: they have no load, so the policy alone would
        choose them again and again.

        Instances in `asked` have failed with the same blocks and are not picked, and neither are
        those that lack the model.
        """
        now, unanswered = time.monotonic(), context.unanswered
        asked = [*asked, *context.lacking]
        picked = pick(role, hints, now, [*context.tried, *asked])
        if picked is not None or not context.tried:
            return picked
        for num_forgiven in range(len(unanswered) + 1):
            picked = pick(role, hints, now, [*unanswered[num_forgiven:], *asked])
            if picked is not None:
                return picked
        return None


def _decode_hints(context: RequestContext, last_turn: LastTurn | None) -> RoutingHints:
    return RoutingHints(context.prompt, last_turn.decoder if last_turn is not None else None)


def _no_instance(role: Role, context: RequestContext) -> LegFailure:
    """Why no instance of the role is left: those that were asked lack the model, or none exists."""
    lacking = [failure for instance, failure in context.lacking.items() if instance.role is role]
    if lacking:
        return lacking[0]
    return LegFailure(
        None,
        f"no {role} instance is available",
        build_error_response(503, f"no {role} instance is available; try again", 1),
    )
