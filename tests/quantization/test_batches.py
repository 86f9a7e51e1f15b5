"""Which training samples calibrate."""

from __future__ import annotations

from pipeline.quantization.batches import spread

TOKENS = [f"{scene}{frame}" for scene in "abcd" for frame in range(5)]
SCENES = {token: token[0] for token in TOKENS}


def test_picks_are_spread_over_all_scenes_in_order() -> None:
    picks = [pick.token for pick in spread(TOKENS, SCENES, 8, 0)]
    assert picks == sorted(picks) and len(set(picks)) == 8
    assert {token[0] for token in picks} == set("abcd")


def test_warm_up_stays_in_the_scene() -> None:
    picks = {pick.token: pick.before for pick in spread(TOKENS, SCENES, 20, 2)}
    assert picks["a0"] == () and picks["b0"] == ()
    assert picks["b1"] == ("b0",) and picks["b4"] == ("b2", "b3")


def test_never_more_than_there_are() -> None:
    assert len(spread(TOKENS, SCENES, 50, 1)) == len(TOKENS)
