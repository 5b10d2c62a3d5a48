"""Serves one client's request with two: P computes the prompt, D takes its blocks and answers. One after the other, or, where P and D are
both known to push, at once.

Runs on the event loop. While the client has got nothing, what one instance fails at is tried on another: a prefill has no side effect, and
nobody has seen a token. A client that leaves cancels the handler, which leaves the leg under way; an engine aborts what its client has
left. What P holds is given back unless D has taken over (`Held`), also when P's answer was on its way (`PrefillLeg`).
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from kvferry.router.calls import Calls
from kvferry.router.conversations import Turn
from kvferry.router.decode_leg import DecodeLeg
from kvferry.router.exchange import Answer, Exchange, Setback
from kvferry.router.failures import error_answer
from kvferry.router.fleet import Fleet, Wish
from kvferry.router.instances import Instance, Role
from kvferry.router.last_look import LastLook
from kvferry.router.legs import Handover
from kvferry.router.prefill_leg import PrefillLeg
from kvferry.router.push_sources import PushSources
from kvferry.router.release import Held, Releases
from kvferry.router.turn_keeper import TurnKeeper
from kvferry.router.twins import run_twins
from kvferry.router.watch import Watch
from kvferry.types import FailurePolicy

__all__ = ["Serving"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prefilled:
    instance: Instance | None
    """None: D computes the prompt itself."""
    handover: Handover | None


@dataclass(frozen=True, slots=True)
class _Twins:
    """What two legs that run at once know of each other."""

    promise: Handover
    held: Held
    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    """P has answered."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """The client has got something of D's answer."""


@dataclass(slots=True)
class Serving:
    calls: Calls
    releases: Releases
    push_sources: PushSources
    watch: Watch
    turns: TurnKeeper
    last_look: LastLook
    prefill: PrefillLeg = field(init=False)
    decode: DecodeLeg = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = PrefillLeg(self.calls, self.push_sources)
        self.decode = DecodeLeg(self.calls, self.turns)

    @property
    def fleet(self) -> Fleet:
        return self.calls.fleet

    async def serve(self, exchange: Exchange) -> None:
        """The client has its answer when this returns."""
        last_turn = await self.turns.take(exchange)
        exchange.retries_left = self.calls.options.routing.max_retries
        while True:
            setback = await self._attempt(exchange, last_turn)
            if setback is None:
                return
            if exchange.reply.is_started or not setback.needs_prefill or not self._may_retry(exchange, setback):
                break
            # Another pair if there is one; else the same again: P may be another life of itself by now.
            last_turn = None
        exchange.error = setback.sentence
        exchange.send(_last_word(setback))

    def _may_retry(self, exchange: Exchange, setback: Setback) -> bool:
        # What was not sent, or was refused, costs no try, as long as it finds others: it ends with the fleet.
        if not (setback.is_unsent or setback.is_refusal) or (setback.instance is not None and exchange.tried.count(setback.instance) > 1):
            if exchange.retries_left <= 0:
                return False
            exchange.retries_left -= 1
        if setback.instance is not None:
            self.calls.metrics.retries.add(setback.instance.role)
        _log.info("tried again request=%s: %s", exchange.request_id, setback.sentence)
        return True

    async def _attempt(self, exchange: Exchange, last_turn: Turn | None) -> Setback | None:
        """One P and one D, and others in the place of those that refuse or cannot be reached."""
        exchange.wish = wish = Wish(exchange.client.prompt, last_turn.prefiller if last_turn is not None else None)
        prefiller = self._choose(Role.PREFILL, exchange, wish)
        if prefiller is not None:
            promise = self.push_sources.invite(prefiller)
            if promise is not None:
                decoder = await self._choose_pushing(exchange, _where_d_was(exchange, last_turn))
                if decoder is not None:
                    return await self._serve_at_once(exchange, (prefiller, decoder), promise, last_turn)
        prefilled = await self._prefill_somewhere(exchange, prefiller, wish, last_turn)
        if isinstance(prefilled, Setback):
            return prefilled
        if isinstance(prefilled, Answer):
            exchange.send(prefilled)
            return None
        exchange.prefiller = prefilled.instance
        with Held(self.releases, prefilled.handover) as held:
            return await self._decode_somewhere(exchange, held, prefilled.handover, last_turn)

    # -- one after the other -------------------------------------------------------------------------------------------

    async def _prefill_somewhere(
        self, exchange: Exchange, instance: Instance | None, wish: Wish, last_turn: Turn | None
    ) -> _Prefilled | Answer | Setback:
        refusal: Setback | None = None
        failure: Setback | None = None
        while instance is not None:
            params = last_turn.params or None if last_turn is not None else None
            result = await self.prefill.run(exchange, instance, self.releases.release, last_turn=params)
            if isinstance(result, Answer):
                return result
            if not isinstance(result, Setback):
                return _Prefilled(instance, result)
            exchange.tried.append(instance)
            if result.is_refusal:
                refusal = result
            else:
                failure, last_turn = result, None
                if not self._may_retry(exchange, result):
                    break
            instance = self.fleet.choose(Role.PREFILL, wish, time.monotonic(), exchange.tried)
        if refusal is not None:
            # They are full or leaving: what they cannot take now is not D's to take.
            return refusal
        if self.calls.options.routing.without_prefill is FailurePolicy.RECOMPUTE:
            exchange.timeline.fallback = failure.sentence if failure is not None else "no prefill instance can be had"
            self.calls.metrics.fallbacks.add()
            return _Prefilled(None, None)
        return failure or _nobody(Role.PREFILL)

    async def _decode_somewhere(self, exchange: Exchange, held: Held, handover: Handover | None, last_turn: Turn | None) -> Setback | None:
        wish = _where_d_was(exchange, last_turn)
        setback: Setback | None = None
        asked: list[Instance] = []
        while (instance := self._next_decoder(exchange, wish, asked)) is not None:
            setback = await self.decode.run(exchange, held, instance, handover)
            if setback is None or exchange.reply.is_started:
                return setback
            exchange.tried.append(instance)
            asked.append(instance)
            if setback.needs_prefill or not (setback.is_refusal or self._may_retry(exchange, setback)):
                return setback
        return setback or _nobody(Role.DECODE)

    # -- at once -------------------------------------------------------------------------------------------------------

    async def _serve_at_once(
        self, exchange: Exchange, pair: tuple[Instance, Instance], promise: Handover, last_turn: Turn | None
    ) -> Setback | None:
        prefiller, decoder = pair
        self.calls.metrics.at_once.add()
        exchange.prefiller = prefiller
        with Held(self.releases, None) as held:
            twins = _Twins(promise, held)
            result: Answer | Setback | None = await run_twins(
                self._prefill_alongside(exchange, prefiller, twins, last_turn),
                self._decode_alongside(exchange, twins, decoder, last_turn),
                twins.has_begun.is_set,
                self.last_look.look_after,
            )
        if isinstance(result, Answer):
            exchange.send(result)
            return None
        if result is not None:
            # D could not get P's KV. If P is another life by now, its next answer shows it.
            self.push_sources.forget(prefiller)
        return result

    async def _prefill_alongside(
        self, exchange: Exchange, prefiller: Instance, twins: _Twins, last_turn: Turn | None
    ) -> Answer | Setback | None:
        """P's objection, if it has one."""
        params = last_turn.params or None if last_turn is not None else None
        result = await self.prefill.run(exchange, prefiller, twins.held.receive, twins.promise.push_ticket, params)
        if isinstance(result, Answer):
            return result
        if isinstance(result, Setback):
            exchange.tried.append(prefiller)
            return replace(result, needs_prefill=True)
        if result is not None:
            twins.held.receive(result)
        twins.is_computed.set()
        return None

    async def _decode_alongside(self, exchange: Exchange, twins: _Twins, decoder: Instance, last_turn: Turn | None) -> Setback | None:
        """One that pushes is asked at once. Where it has refused, the next may pull: that one waits for P's own ticket."""
        wish = _where_d_was(exchange, last_turn)
        setback: Setback | None = None
        asked: list[Instance] = []
        instance: Instance | None = decoder
        while instance is not None:
            is_push = await self.watch.pushes(instance)
            if not is_push:
                await twins.is_computed.wait()
            handover = twins.promise if is_push else twins.held.handover
            setback = await self.decode.run(exchange, twins.held, instance, handover, twins.has_begun)
            if setback is None or exchange.reply.is_started:
                return setback
            exchange.tried.append(instance)
            asked.append(instance)
            self.watch.forget(instance)
            if not setback.is_refusal:
                return replace(setback, needs_prefill=True)
            instance = self._next_decoder(exchange, wish, asked)
        return setback or _nobody(Role.DECODE)

    # -- whom ----------------------------------------------------------------------------------------------------------

    async def _choose_pushing(self, exchange: Exchange, wish: Wish) -> Instance | None:
        """The next D if it pushes. One that does not keeps its turn, for when P is through."""
        now = time.monotonic()
        next_up = self.fleet.peek(Role.DECODE, wish, now, exchange.tried) or self.fleet.peek(Role.DECODE, wish, now)
        if next_up is None or not await self.watch.pushes(next_up):
            return None
        return self._choose(Role.DECODE, exchange, wish)

    def _choose(self, role: Role, exchange: Exchange, wish: Wish) -> Instance | None:
        """One that has not failed this request, or, if all have, one of them again: only a new attempt asks for it."""
        now = time.monotonic()
        chosen = self.fleet.choose(role, wish, now, exchange.tried)
        return chosen if chosen is not None or not exchange.tried else self.fleet.choose(role, wish, now)

    def _next_decoder(self, exchange: Exchange, wish: Wish, asked: list[Instance]) -> Instance | None:
        """One that has not failed this request, or one that has failed it with other blocks than these: that may have been P's fault."""
        now = time.monotonic()
        chosen = self.fleet.choose(Role.DECODE, wish, now, exchange.tried)
        return chosen if chosen is not None or not exchange.tried else self.fleet.choose(Role.DECODE, wish, now, asked)


def _where_d_was(exchange: Exchange, last_turn: Turn | None) -> Wish:
    return Wish(exchange.client.prompt, last_turn.decoder if last_turn is not None else None)


def _nobody(role: Role) -> Setback:
    return Setback(None, f"no {role} instance can be had now", error_answer(503, f"no {role} instance can be had now; try again", 1))


def _last_word(setback: Setback) -> Answer:
    """What the instance said if it said something a client can use, else that it failed."""
    return setback.answer if setback.answer is not None else error_answer(502, setback.sentence)
