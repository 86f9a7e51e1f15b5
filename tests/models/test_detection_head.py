from __future__ import annotations

import torch

from pipeline.models.heads.detection import SPEED_STEP_MPS, add_field, catch_up


def test_a_new_instance_takes_shape_and_velocity_of_the_field_and_a_remembered_one_keeps_its_own() -> None:
    boxes = torch.full((1, 2, 11), 0.5)
    field = torch.ones(1, 20, 2, 1)  # classes 10, way 2, shape 6, velocity 2
    new = torch.tensor([[[1.0], [0.0]]])
    scores, moved = add_field(torch.zeros(1, 2, 10), boxes, field, new)
    assert bool((scores == 1.0).all())
    assert torch.equal(moved[0, 0, 2:10], torch.tensor([1.5] * 6 + [0.5 + SPEED_STEP_MPS] * 2))
    assert torch.equal(moved[0, 1, 2:], boxes[0, 1, 2:])
    assert torch.equal(moved[0, 0, :2], moved[0, 1, :2])  # both go to the box


def test_velocity_follows_the_shift_of_a_remembered_instance() -> None:
    reference = torch.zeros(1, 2, 11)
    boxes = reference.clone()
    boxes[0, :, 0] = 2.0  # found 2 m ahead of where it was expected
    moved = catch_up(boxes, reference, torch.tensor([[[0.5], [0.0]]]))
    assert moved[0, 0, 8] == 1.0 and moved[0, 1, 8] == 0.0
    assert torch.equal(moved[..., :8], boxes[..., :8])
