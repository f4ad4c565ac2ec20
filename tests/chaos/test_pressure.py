"""The pressure scenario's checks of refusals, and of answers with several samples."""

from __future__ import annotations

import pytest

from common.errors import InvalidArgument
from common.group_need import GroupRoom
from common.kv_retention import KvRules
from gateway.intake.group_limits import max_tokens_within
from gateway.intake.wanted import Wanted
from testing.chaos.book import Case
from testing.chaos.pressure import BLOCK_SIZE, REFUSAL, TOO_WIDE, blocks_needed
from testing.chaos.traffic import _right


@pytest.mark.parametrize("wanted", [Wanted(n=16), Wanted(beam_width=16), Wanted()])
def test_the_gateways_sentence_is_a_refusal(wanted: Wanted) -> None:
    limits = [GroupRoom(64, 12, KvRules(BLOCK_SIZE))]
    with pytest.raises(InvalidArgument) as refused:
        max_tokens_within(wanted, len(TOO_WIDE.prompt_ids), limits, TOO_WIDE.max_tokens, clip=False)
    assert REFUSAL.match(f"InvalidArgument: {refused.value}"), refused.value
    assert not REFUSAL.match("InvalidArgument: prompt must fit")


def test_a_token_of_any_sample_counts() -> None:
    case = Case((1,), TOO_WIDE.sampling, 2, ((1, 2), (3, 4)))
    assert _right([[1, 2], [3]], case) and not _right([[1, 2], [3, 5]], case)
    assert not _right([[1]], TOO_WIDE) and _right([[]], TOO_WIDE)
    assert blocks_needed(TOO_WIDE) > 256
