"""Losses of the three heads and of the training-only branches. Every function returns a scalar that is finite for finite inputs, also without
labels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config import ModelConfig
from pipeline.models import bspline
from pipeline.models.multitask import Outputs
from pipeline.taxonomy import OCCUPANCY_FREE
from pipeline.training.assignment import nearest_anchors, one_to_one
from pipeline.training.targets import FREE_THINNING, LINE_POINTS, UNSEEN, Targets

# Weight of each number of a box state: position in metres, log size, heading, velocity.
BOX_WEIGHTS = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 0.2, 0.2, 0.0)
ANCHORS_PER_BOX, BOX_RADIUS_M = 4, 4.0
ANCHORS_PER_LINE, LINE_RADIUS_M = 4, 5.0
CERTAIN_NO = -20.0


def focal_loss(logits: Tensor, target: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Sum of the sigmoid focal loss (Lin et al., ICCV 2017) over all entries; `target` in {0, 1}, same shape as `logits`."""
    cross_entropy = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    probability = logits.sigmoid()
    miss = torch.where(target > 0.5, 1 - probability, probability)
    weight = torch.where(target > 0.5, alpha, 1 - alpha)
    return (weight * miss**gamma * cross_entropy).sum()


def no_answer(logits: Tensor, known: Tensor) -> Tensor:
    """Logits where `known` (broadcast to them), elsewhere those of a certain no: with the truth 0 they cost nothing and teach nothing."""
    return torch.where(known, logits, CERTAIN_NO)


def heat_loss(logits: Tensor, heat: Tensor) -> Tensor:
    """Penalty-reduced focal loss of heat maps (Law and Deng, CornerNet, ECCV 2018), divided by the number of peaks."""
    probability = logits.sigmoid()
    peak = heat > 0.999
    at_peak = -functional.logsigmoid(logits) * (1 - probability) ** 2
    beside = -functional.logsigmoid(-logits) * probability**2 * (1 - heat) ** 4
    return torch.where(peak, at_peak, beside).sum() / peak.sum().clamp(min=1)


def detection_loss(outputs: Outputs, anchors: Tensor, targets: list[Targets], one_to_one_last: bool) -> Tensor:
    """Class and box loss of all layers, divided by the number of boxes.

    Args:
        outputs: of B samples.
        anchors: (B, N, 11) what the first layer started from.
        targets: B samples.
        one_to_one_last: in the last layer every label has one instance; else its nearest ones, as in the layers before.
    """
    references = [anchors, *outputs.det_boxes[:-1]]
    losses = []
    last = len(references) - 1
    for layer, batch in enumerate(zip(references, outputs.det_logits, outputs.det_boxes, strict=True)):
        # unbind, not indexing: the gradient of an index fills a whole batch of zeros for each sample.
        for reference, logits, boxes, target in zip(*(tensor.unbind() for tensor in batch), targets, strict=True):
            pairs = box_pairs(reference.detach(), logits, boxes, target, one=one_to_one_last and layer == last)
            losses.append(box_layer_loss(logits, boxes, target, pairs))
    return torch.stack(losses).mean()


def box_pairs(reference: Tensor, logits: Tensor, boxes: Tensor, target: Targets, one: bool) -> tuple[Tensor, Tensor]:
    """Instances and labels that belong together in one layer of one sample."""
    if not one:
        return nearest_anchors(torch.cdist(reference[:, :2], target.boxes[:, :2]), ANCHORS_PER_BOX, BOX_RADIUS_M)
    probability = logits.detach().sigmoid()[:, target.box_class]
    distance = torch.cdist(boxes.detach()[:, :2], target.boxes[:, :2], p=1)
    anchored = torch.cdist(reference[:, :2], target.boxes[:, :2], p=1)
    return one_to_one(0.5 * distance + 0.25 * anchored - 4.0 * probability)


def box_layer_loss(logits: Tensor, boxes: Tensor, target: Targets, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Focal loss of the classes and weighted L1 of the box states of matched instances."""
    instance, label = pairs
    truth = torch.zeros_like(logits)
    truth[instance, target.box_class[label]] = 1.0
    state = target.boxes[label]
    error = (boxes[instance] - torch.nan_to_num(state)).abs() * boxes.new_tensor(BOX_WEIGHTS)
    error = torch.where(state.isnan(), 0.0, error)
    count = max(len(instance), 1)
    return 2.0 * focal_loss(logits, truth) / count + error.sum() / count


class MapLoss:
    """Class loss, line-distance loss and topology loss of the map head."""

    def __init__(self, config: ModelConfig, one_to_one_last: bool) -> None:
        """`one_to_one_last`: as in `detection_loss`."""
        self.one_to_one_last = one_to_one_last
        self.basis = torch.from_numpy(bspline.basis(LINE_POINTS, config.map.spline_degree))

    def __call__(self, outputs: Outputs, anchors: Tensor, targets: list[Targets]) -> Tensor:
        """Mean over the samples that have a map label; zero without any. `anchors` (1, Q, 6, 3)."""
        batch = len(targets)
        references = [anchors.expand(batch, -1, -1, -1)]
        references += [state[..., :-2].detach().reshape(batch, -1, bspline.CONTROL_POINTS, 3) for state in outputs.map_states[:-1]]
        losses = []
        last = len(references) - 1
        for layer, tensors in enumerate(zip(references, outputs.map_logits, outputs.map_states, strict=True)):
            for reference, logits, state, target in zip(*(tensor.unbind() for tensor in tensors), targets, strict=True):
                if target.lines is not None:
                    losses.append(self.layer_loss(logits, state, reference, target, one=self.one_to_one_last and layer == last))
        return torch.stack(losses).mean() if losses else outputs.map_logits[-1].sum() * 0.0

    def layer_loss(self, logits: Tensor, state: Tensor, reference: Tensor, target: Targets, one: bool) -> Tensor:
        """One layer of one sample: logits (Q, 3), state (Q, 20), reference control points (Q, 6, 3)."""
        assert target.lines is not None and target.line_class is not None and target.line_closed is not None and target.line_labelled is not None
        logits = no_answer(logits, target.line_labelled)
        control = state[:, :-2].reshape(-1, bspline.CONTROL_POINTS, 3)
        curve = self.basis @ control  # (Q, LINE_POINTS, 3)
        truth = torch.zeros_like(logits)
        if len(target.line_class) == 0:
            return 2.0 * focal_loss(logits, truth)
        query, label, order = self.match(logits, curve.detach(), reference, target, one)
        truth[query, target.line_class[label]] = 1.0
        points = target.lines[label, order]  # (K, LINE_POINTS, 2)
        found = curve[query]
        shift = (found[..., :2] - points).abs().sum(-1).mean(-1)  # (K,)
        distance = 0.5 * shift + chamfer(found[..., :2], points) + 0.1 * found[..., 2].abs().mean(-1)
        count = max(len(query), 1)
        closed = target.line_closed[label].to(logits.dtype)
        attribute = functional.binary_cross_entropy_with_logits(state[query, -2], closed, reduction="sum")
        quality = functional.binary_cross_entropy_with_logits(state[query, -1], (-shift.detach()).exp(), reduction="sum")
        topology = topology_loss(found[..., :2], points, closed)
        return (2.0 * focal_loss(logits, truth) + distance.sum() + 0.2 * attribute + 0.2 * quality) / count + 0.5 * topology

    def match(self, logits: Tensor, curve: Tensor, reference: Tensor, target: Targets, one: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, labels and the point order in which the label is nearest."""
        assert target.lines is not None and target.line_class is not None
        anchored, _ = order_distance((self.basis @ reference)[..., :2], target.lines)
        distance, order = order_distance(curve[..., :2], target.lines)
        if one:
            probability = logits.detach().sigmoid()[:, target.line_class]
            query, label = one_to_one(0.5 * anchored + distance - 2.0 * probability)
        else:
            query, label = nearest_anchors(anchored, ANCHORS_PER_LINE, LINE_RADIUS_M)
        return query, label, order[query, label]


def order_distance(curve: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
    """Mean L1 distance of curves (Q, P, 2) to lines (L, V, P, 2) in their nearest point order: distance and order, both (Q, L)."""
    labels, orders, points, _ = lines.shape
    distance = torch.cdist(curve.flatten(1), lines.reshape(labels * orders, points * 2), p=1) / points
    nearest = distance.reshape(-1, labels, orders).min(dim=2)
    return nearest.values, nearest.indices


def chamfer(first: Tensor, second: Tensor) -> Tensor:
    """(K, P, 2) and (K, P, 2) -> (K,) mean nearest distance, both ways: the line-distance loss, blind to how points are spaced along the line."""
    distance = torch.cdist(first, second)
    return 0.5 * (distance.min(dim=1).values.mean(-1) + distance.min(dim=2).values.mean(-1))


def topology_loss(curve: Tensor, points: Tensor, closed: Tensor) -> Tensor:
    """Closed elements end where they start, and elements whose labels share an end point share it, too.

    Args:
        curve: (K, P, 2) matched predictions.
        points: (K, P, 2) their labels in the matched order.
        closed: (K,) 1 for closed labels.
    """
    if len(curve) == 0:
        return curve.sum()
    gap = (curve[:, 0] - curve[:, -1]).abs().sum(-1)
    loss = (gap * closed).sum() / closed.sum().clamp(min=1)
    ends, label_ends = curve[:, [0, -1]].reshape(-1, 2), points[:, [0, -1]].reshape(-1, 2)
    joined = (torch.cdist(label_ends, label_ends) < 0.05).triu(1)
    joined &= (1 - closed).repeat_interleave(2).bool().unsqueeze(1) & (1 - closed).repeat_interleave(2).bool()
    first, second = joined.nonzero(as_tuple=True)
    return loss + (ends[first] - ends[second]).abs().sum() / max(len(first), 1)


class OccupancyLoss:
    """Cross-entropy with class weights plus a soft Dice loss over the classes of the sample, on the voxels a camera sees."""

    def __init__(self, class_weights: Tensor) -> None:
        """`class_weights` (18,) for all voxels; that of free space is raised by the thinning of its targets."""
        self.class_weights = class_weights.clone()
        self.class_weights[OCCUPANCY_FREE] *= FREE_THINNING

    def __call__(self, logits: Tensor, targets: list[Targets]) -> Tensor:
        """Logits (B, V, 18); mean over the samples with labels, zero without any."""
        truths = [target.bev.occupancy if target.bev is not None else None for target in targets]
        labelled = [number for number, truth in enumerate(truths) if truth is not None]
        if not labelled:
            return logits.sum() * 0.0
        labels = torch.stack([truth for truth in truths if truth is not None])
        chosen = logits if len(labelled) == len(targets) else logits[labelled]
        seen = (labels.flatten() != UNSEEN).nonzero().squeeze(1)
        voxels, classes = chosen.flatten(0, 1).index_select(0, seen), labels.flatten()[seen].long()
        return functional.cross_entropy(voxels, classes, self.class_weights) + dice_loss(voxels, classes)


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - mean soft Dice coefficient of the classes that occur; logits (V, 18), labels (V,). It follows IoU, so rare classes count as much as
    common ones.
    """
    probability = logits.softmax(dim=-1)
    count = torch.bincount(labels, minlength=logits.shape[-1]).to(probability.dtype)
    overlap = torch.zeros_like(count).index_add(0, labels, probability.gather(1, labels.unsqueeze(1)).squeeze(1))
    # A kept free voxel stands for FREE_THINNING of them.
    stands_for = torch.where(labels == OCCUPANCY_FREE, float(FREE_THINNING), 1.0)
    size = stands_for @ probability + count
    occurs = count > 0
    occurs[OCCUPANCY_FREE] = False
    dice = (2 * overlap + 1) / (size + 1)
    return 1 - dice[occurs].mean() if occurs.any() else logits.sum() * 0.0


def cell_loss(logits: Tensor, labels: Tensor, unknown: int) -> Tensor:
    """Cross-entropy of logits (B, K, Hf, Wf) at the cells of `labels` (B, Hf, Wf) that are not `unknown`; zero without any."""
    known = (labels.flatten() != unknown).nonzero().squeeze(1)
    if len(known) == 0:
        return logits.sum() * 0.0
    rows = logits.permute(0, 2, 3, 1).reshape(-1, logits.shape[1]).index_select(0, known)
    return functional.cross_entropy(rows, labels.flatten()[known].long())


def depth_loss(logits: Tensor, bins: Tensor) -> Tensor:
    """Cross-entropy of a depth distribution (B, D, Hf, Wf) with fractional bins (B, Hf, Wf), shared between their two neighbours; -1 is unknown.

    The lift interpolates between bins in the same way.
    """
    known = (bins.flatten() >= 0).nonzero().squeeze(1)
    if len(known) == 0:
        return logits.sum() * 0.0
    log_probability = logits.permute(0, 2, 3, 1).reshape(-1, logits.shape[1]).index_select(0, known).log_softmax(dim=-1)
    truth = bins.flatten()[known]
    lower = truth.floor().clamp(max=logits.shape[1] - 2)
    share = (truth - lower).unsqueeze(1)
    index = lower.long().unsqueeze(1)
    return -(log_probability.gather(1, index) * (1 - share) + log_probability.gather(1, index + 1) * share).mean()


def field_loss(field: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error of two fields of one shape where `truth` is not NaN; zero where it is NaN everywhere."""
    known = ~truth.isnan()
    return ((field - torch.nan_to_num(truth)).abs() * known).sum() / known.sum().clamp(min=1)


def drawn_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross-entropy plus soft Dice of drawn map elements, both (B, 3, rows, columns); classes that are UNSEEN in a sample do not count."""
    known = truth != UNSEEN
    logits, truth = no_answer(logits, known), truth * known
    cross_entropy = functional.binary_cross_entropy_with_logits(logits, truth, pos_weight=logits.new_tensor(4.0))
    probability = logits.sigmoid()
    axes = (0, 2, 3)
    dice = (2 * (probability * truth).sum(axes) + 1) / (probability.sum(axes) + truth.sum(axes) + 1)
    return cross_entropy + (1 - dice).mean()
