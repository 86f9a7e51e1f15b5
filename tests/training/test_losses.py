from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.config import BalanceConfig
from pipeline.training.assignment import nearest_anchors, one_to_one
from pipeline.training.balance import gradient_norms, update_weights
from pipeline.training.labels import MapLines
from pipeline.training.losses import (
    MapLoss,
    OccupancyLoss,
    box_layer_loss,
    cell_loss,
    chamfer,
    depth_loss,
    drawn_loss,
    focal_loss,
    heat_loss,
    order_distance,
    topology_loss,
)
from pipeline.training.targets import LINE_POINTS, UNSEEN, BevTargets, Targets, line_orders
from tests.models.tiny import tiny_config


def empty_targets(**fields: object) -> Targets:
    values = {"boxes": torch.zeros(0, 11), "box_class": torch.zeros(0, dtype=torch.long)}
    absent = dict.fromkeys(("lines", "line_class", "line_closed", "line_labelled", "bev", "image"))
    return Targets(**{**absent, **values, **fields})


def test_focal_loss_is_cross_entropy_scaled_by_the_miss() -> None:
    logit = torch.tensor([[0.0]])
    # p = 1/2: alpha (1 - p)^2 ln 2 for a positive, (1 - alpha) p^2 ln 2 for a negative.
    assert float(focal_loss(logit, torch.ones(1, 1))) == pytest.approx(0.25 * 0.25 * math.log(2))
    assert float(focal_loss(logit, torch.zeros(1, 1))) == pytest.approx(0.75 * 0.25 * math.log(2))


def test_a_perfect_heat_map_costs_nothing_and_a_shifted_one_more_than_a_near_one() -> None:
    heat = torch.zeros(1, 1, 5)
    heat[0, 0] = torch.tensor([0.0, 0.5, 1.0, 0.5, 0.0])
    sharp = torch.full((1, 1, 5), -20.0)
    perfect, near, far = sharp.clone(), sharp.clone(), sharp.clone()
    perfect[0, 0, 2], near[0, 0, 3], far[0, 0, 4] = 20.0, 5.0, 5.0
    assert float(heat_loss(perfect, heat)) == pytest.approx(0.0, abs=1e-5)
    assert float(heat_loss(near, heat)) < float(heat_loss(far, heat))


def test_nearest_anchors_serve_one_label_each() -> None:
    distance = torch.tensor([[0.1, 3.0], [0.2, 0.15], [9.0, 0.4], [9.0, 9.0]])
    anchors, labels = nearest_anchors(distance, 2, radius=1.0)
    assert list(zip(anchors.tolist(), labels.tolist(), strict=True)) == [(0, 0), (1, 1), (2, 1)]


def test_a_label_without_an_anchor_in_reach_gets_the_nearest() -> None:
    anchors, labels = nearest_anchors(torch.tensor([[50.0], [40.0]]), 2, radius=1.0)
    assert (anchors.tolist(), labels.tolist()) == ([1], [0])


def test_one_to_one_survives_values_that_are_not_finite() -> None:
    rows, columns = one_to_one(torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [0.5, 3.0]]))
    assert dict(zip(columns.tolist(), rows.tolist(), strict=True)) == {0: 2, 1: 1}


def test_unknown_velocity_costs_nothing() -> None:
    state = torch.zeros(1, 11)
    state[0, 8:10] = float("nan")
    target = empty_targets(boxes=state, box_class=torch.tensor([0]))
    boxes = torch.zeros(1, 11)
    boxes[0, 8] = 7.0
    logits = torch.full((1, 10), -20.0)
    logits[0, 0] = 20.0
    pair = (torch.tensor([0]), torch.tensor([0]))
    assert float(box_layer_loss(logits, boxes, target, pair)) == pytest.approx(0.0, abs=1e-5)


def map_targets(lines_m: list[np.ndarray], closed: list[bool]) -> Targets:
    labels = MapLines(lines_m, np.zeros(len(lines_m), dtype=np.int64), np.array(closed))
    return empty_targets(
        lines=torch.from_numpy(line_orders(labels)),
        line_class=torch.from_numpy(labels.class_id),
        line_closed=torch.from_numpy(labels.closed),
        line_labelled=torch.from_numpy(labels.labelled),
    )


def test_a_class_that_the_map_does_not_know_is_not_taught_to_be_absent() -> None:
    config = tiny_config()
    control = torch.stack([torch.linspace(-10, 10, 6), torch.full((6,), 1.0), torch.zeros(6)], dim=-1)[None]
    state, logits = torch.cat([control.flatten(1), torch.zeros(1, 2)], dim=1), torch.zeros(1, 3, requires_grad=True)
    target = replace(map_targets([np.float32([[-10, 0], [10, 0]])], [False]), line_labelled=torch.tensor([True, False, True]))
    MapLoss(config, False).layer_loss(logits, state, control, target, False).backward()
    assert logits.grad is not None
    assert (logits.grad != 0).tolist() == [[True, False, True]]


def test_drawn_elements_of_an_unknown_class_do_not_count() -> None:
    logits = torch.zeros(1, 3, 2, 2, requires_grad=True)
    truth = torch.zeros(1, 3, 2, 2)
    truth[:, 0, 0], truth[:, 1] = 1.0, UNSEEN
    drawn_loss(logits, truth).backward()
    assert logits.grad is not None
    assert [bool((logits.grad[:, number] != 0).all()) for number in range(3)] == [True, False, True]


@pytest.mark.parametrize("one", [False, True])
def test_map_loss_has_finite_gradients_and_pulls_towards_the_line(one: bool) -> None:
    config = tiny_config()
    loss = MapLoss(config, one)
    along = torch.linspace(-10, 10, 6)
    reference = torch.stack([along, torch.full((6,), 1.0), torch.zeros(6)], dim=-1)[None]
    state = torch.cat([reference.flatten(1), torch.zeros(1, 2)], dim=1).requires_grad_()
    logits = torch.zeros(1, 3, requires_grad=True)
    target = map_targets([np.float32([[-10, 0], [10, 0]])], [False])
    loss.layer_loss(logits, state, reference, target, one).backward()
    assert state.grad is not None
    assert bool(state.grad.isfinite().all())
    assert bool((state.grad[0, :18].reshape(6, 3)[:, 1] > 0).all())  # y must fall
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) < 0 < float(logits.grad[0, 1])


def test_line_distance_does_not_depend_on_direction_or_start() -> None:
    square = np.float32([[0, 0], [4, 0], [4, 4], [0, 4], [0, 0]])
    target = map_targets([np.float32([[0, 0], [5, 0]]), square], [False, True])
    assert target.lines is not None
    backwards = target.lines[0, 0].flip(0)
    shifted = target.lines[1, 4]
    distance, order = order_distance(torch.stack([backwards, shifted]), target.lines)
    assert float(distance[0, 0]) == pytest.approx(0.0, abs=1e-6)
    assert float(distance[1, 1]) == pytest.approx(0.0, abs=1e-6)
    assert int(order[1, 1]) == 4


def test_chamfer_of_parallel_lines_is_their_distance() -> None:
    line = torch.stack([torch.linspace(0, 19, LINE_POINTS), torch.zeros(LINE_POINTS)], dim=-1)[None]
    assert float(chamfer(line, line + torch.tensor([0.0, 2.0]))) == pytest.approx(2.0)


def test_topology_loss_closes_rings_and_joins_lines() -> None:
    points = torch.zeros(2, LINE_POINTS, 2)
    points[0, :, 0], points[1, :, 0] = torch.linspace(0, 5, LINE_POINTS), torch.linspace(5, 9, LINE_POINTS)
    apart = points.clone()
    apart[1, 0, 1] = 1.0
    open_lines = torch.zeros(2)
    assert float(topology_loss(points, points, open_lines)) == 0.0
    assert float(topology_loss(apart, points, open_lines)) == pytest.approx(1.0)
    assert float(topology_loss(points[:1], points[:1], torch.ones(1))) == pytest.approx(5.0)  # an open prediction of a closed element


def test_occupancy_loss_ignores_unseen_voxels_and_is_zero_without_labels() -> None:
    loss = OccupancyLoss(torch.ones(18))
    labels = torch.tensor([4, UNSEEN, 17], dtype=torch.uint8)
    logits = torch.zeros(1, 3, 18)
    logits[0, 0, 4] = logits[0, 2, 17] = 30.0
    wrong = logits.clone()
    wrong[0, 1, 3] = 50.0
    target = [empty_targets(bev=BevTargets(labels, torch.zeros(10, 4, 4), torch.zeros(8, 4, 4), None, None))]
    assert float(loss(logits, target)) == pytest.approx(0.0, abs=1e-4)
    assert float(loss(wrong, target)) == pytest.approx(float(loss(logits, target)))
    assert float(loss(logits, [empty_targets()])) == 0.0


def test_cell_loss_is_cross_entropy_where_something_is_known() -> None:
    bins = torch.full((6, 2, 2), -1)
    assert float(cell_loss(torch.zeros(6, 8, 2, 2), bins, unknown=-1)) == 0.0
    bins[0, 0, 0] = 3
    assert float(cell_loss(torch.zeros(6, 8, 2, 2), bins, unknown=-1)) == pytest.approx(math.log(8))


def test_depth_loss_shares_a_fractional_bin_between_its_neighbours() -> None:
    bins = torch.full((1, 1, 2), -1.0)
    assert float(depth_loss(torch.zeros(1, 8, 1, 2), bins)) == 0.0
    bins[0, 0, 1] = 2.25
    probability = torch.full((8,), 1e-9)
    probability[2], probability[3] = 0.75, 0.25
    logits = probability.log().reshape(1, 8, 1, 1).repeat(1, 1, 1, 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(depth_loss(logits, bins)) == pytest.approx(entropy, abs=1e-5)
    bins[0, 0, 1] = 7.0  # the last bin has no upper neighbour
    assert float(depth_loss(torch.zeros(1, 8, 1, 2), bins)) == pytest.approx(math.log(8))


def test_balance_takes_weight_from_the_task_that_pulls_harder() -> None:
    weights = update_weights({"a": 1.0, "b": 1.0}, {"a": 4.0, "b": 1.0}, BalanceConfig())
    assert weights["a"] < 1.0 < weights["b"]
    assert sum(weights.values()) == pytest.approx(2.0)


def test_balance_converges_to_equal_pulls_and_does_not_run_away() -> None:
    norms = {"detection": 100.0, "map": 1.0, "occupancy": 3.0}
    weights = dict.fromkeys(norms, 1.0)
    for _ in range(500):
        weights = update_weights(weights, norms, BalanceConfig())
    pulls = [weights[task] * norms[task] for task in norms]
    assert max(pulls) / min(pulls) < 1.6
    assert sum(weights.values()) == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_balance_leaves_absent_tasks_alone(bad: float) -> None:
    weights = update_weights({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 2.0, "b": 2.0, "c": bad}, BalanceConfig())
    assert weights == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})


def test_gradient_norms_are_taken_at_the_shared_feature() -> None:
    feature = torch.ones(4, requires_grad=True)
    norms = gradient_norms({"a": (3 * feature).sum(), "b": torch.ones(1, requires_grad=True).sum()}, [feature])
    assert norms == {"a": pytest.approx(6.0), "b": 0.0}
