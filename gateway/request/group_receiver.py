"""Receives the outputs of a group from the session with a decode worker, and passes them to the request."""

from __future__ import annotations

from gateway.fleet.decode_client import DecodeSession, SubmittedGroup
from gateway.fleet.worker_lost import rejected
from gateway.request.isolation import IsolationTicket
from gateway.request.sample import Sample
from gateway.request.state import RequestState
from protos.v1 import decode_pb2


class GroupReceiver:
    """A receiver that adds a group's outputs to the request's state, and flushes the request's outlet."""

    __slots__ = ("_group", "_is_accounted", "_isolation", "_last", "_session", "_some_ended", "_state")

    def __init__(self, state: RequestState, session: DecodeSession, isolation: IsolationTicket) -> None:
        self._state = state
        self._session = session
        self._isolation: IsolationTicket | None = isolation
        self._some_ended = False
        """Whether a sample has ended since the last flush."""
        self._is_accounted = False
        """Whether the worker has rejected the group and the group's time has been added to the request's times."""
        self._last: decode_pb2.SequenceOutput | None = None
        """The last output with which the worker ended a sample. It has the worker's times."""

    def submit(self, message: decode_pb2.Submit, going: list[Sample]) -> SubmittedGroup:
        group = self._group = self._session.submit(message, [sample.index for sample in going], self)
        for sample in going:
            if sample.finish_reason is not None:  # by a stop string in its first token
                self._session.cancel_sample(group, sample.index)
        return group

    def take_token(self, sample: int, output_index: int, token_id: int) -> None:
        if self._state.accept_token(sample, output_index, token_id):
            self._stopped(sample)

    def take(self, output: decode_pb2.SequenceOutput) -> None:
        if output.rejection:
            self._add_time_of_rejected(output.account)
            raise rejected(output.rejection, self._state.request.timeout_s)
        if self._state.accept(output):
            self._stopped(output.sample_index)
        elif output.finish_reason:
            self._some_ended, self._last = True, output

    def flush(self) -> None:
        if self._isolation is not None:  # the first step with this group is over
            self._isolation.leave()
            self._isolation = None
        if self._some_ended:
            self._flush_end()
        else:
            self._state.outlet.flush()

    def _flush_end(self) -> None:
        self._some_ended, state = False, self._state
        if not state.num_open:
            self._add_decode_time()
            state.sum_up()
            self._group.end()
        state.outlet.flush(at_once=True)

    def _stopped(self, sample: int) -> None:
        """Tells the worker that a stop string ended a sample. Workers do not look for stop strings."""
        self._some_ended = True
        self._session.cancel_sample(self._group, sample)

    def _add_decode_time(self) -> None:
        """Adds the attempt's decode and hand-over times to the times of the request. If the worker has reported no
        times, for example because stop strings ended all samples, the whole phase counts as decode time.
        """
        last, state = self._last, self._state
        if last is not None and last.timings.decode_ns:
            timings = last.timings
            state.took(hand_over_ns=timings.hand_over_ns, decode_ns=timings.decode_ns)
            state.explanation.decoded(last.account, timings.decode_ns)
        else:
            state.took(decode_ns=state.explanation.leave())

    def _add_time_of_rejected(self, account: decode_pb2.GroupAccount) -> None:
        spent_ns = self._state.explanation.decoded(account, None)
        hand_over_ns = min(account.claim_ns, spent_ns)
        self._state.took(hand_over_ns=hand_over_ns, decode_ns=spent_ns - hand_over_ns)
        self._is_accounted = True

    def lost(self) -> None:
        """Adds the time of a group that was lost, unless its worker has rejected the group and reported the time."""
        if not self._is_accounted:
            self._state.took(decode_ns=self._state.explanation.leave())
